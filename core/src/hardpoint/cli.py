"""The ``hardpoint`` command: runs one subcommand and turns what it raises into an exit code.

Light on purpose: whatever is heavier than this file is imported within :func:`main`, so that an
interrupt is quiet from the first moment.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of the signal."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What standard output answers that cannot take more: a full disk, most often."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; the console script ``hardpoint`` calls it.

    An error that Hardpoint raises on purpose becomes one paragraph on standard error and its own
    exit code, and so does a full disk; a reader that went away (``| head``) ends the command
    quietly.
    """
    if _without_output():
        sys.stderr.write("Error: standard output is closed; send it somewhere, to a file say\n")
        sys.exit(1)
    try:
        code = _run(None if arguments is None else list(arguments))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        code = 1
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        _drop_output()
        sys.stderr.write(f"Error: cannot write the output: {error.strerror}\n")
        code = 1
    sys.exit(code)


def _without_output() -> bool:
    """Give closed standard streams (``2>&-``) a place, so that nobody meets None in theirs; return
    whether standard output was one of them.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 - it lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    return sys.stdout is None


def _drop_output() -> None:
    """Python flushes standard output at exit and would complain of the same thing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str] | None) -> int:
    import click

    from hardpoint.cli_group import commands
    from hardpoint.errors import HardpointError

    try:
        result = commands.main(args=arguments, prog_name="hardpoint", standalone_mode=False)
        sys.stdout.flush()
    except HardpointError as error:
        click.echo(f"Error: {error}", err=True)
        return error.exit_code
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return result if isinstance(result, int) else 0
