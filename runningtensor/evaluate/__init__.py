"""Downstream evaluation: tasks of lm-evaluation-harness, needles in haystacks, and recall on one's own texts."""
