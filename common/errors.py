"""The errors that end a run with one clear line."""


class UsageError(Exception):
    """Bad input of the user: one clear line. `launch.run` prints it once and ends all ranks with status 2."""


class CommunicationError(RuntimeError):
    """A collective failed because another rank is gone or did not answer in time."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a C++ stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
