"""Models at work: states in files, a chat, a server."""

from runningtensor.serve.states import load_state, save_state

__all__ = ["load_state", "save_state"]
