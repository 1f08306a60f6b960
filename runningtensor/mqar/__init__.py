"""Multi-query associative recall: the task, its models, runs and tables."""
