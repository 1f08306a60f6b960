"""`python -m runningtensor`, and so `torchrun -m runningtensor`."""

from runningtensor.cli import app

app()
