import common.entry  # noqa: F401 (before a test, or a command in here, loads PyTorch)
