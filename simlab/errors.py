"""The two kinds of failure a user can cause or meet; the command line turns each into one line.

`UsageError` (exit code 2): what was asked cannot be done (unknown policy, slots below zero).
`SimlabError` (exit code 1): what was asked failed on the way (damaged file, full disk, a policy's
error).
"""


class SimlabError(Exception):
    """Something failed; the message says what, where and what to do. Exit code 1."""

    exit_code = 1


class UsageError(SimlabError):
    """The request itself is wrong; the message says what to type instead. Exit code 2."""

    exit_code = 2


class TraceError(SimlabError):
    """A trace file cannot be read or does not hold a valid trace."""


class PolicyError(SimlabError):
    """A policy file is unusable, or a policy broke the protocol while it ran."""
