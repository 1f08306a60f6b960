"""Tasks of our own, in the format of lm-evaluation-harness: `lm_eval --include_path` takes this folder."""
