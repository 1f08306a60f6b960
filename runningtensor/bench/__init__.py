"""Speed and memory, beside the alternatives."""
