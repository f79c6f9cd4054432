"""``hardpoint generate`` and ``hardpoint chat``, declared. Light: help must not load the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from hardpoint.cli_options import configuration_options

from hardpoint_engine.cli.command_options import sampling_options
from hardpoint_engine.cli.interruption import interruptible


def chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``command`` with the flags of a conversation."""
    template = click.option(
        "--chat-template", metavar="FILE", help="template to use instead of the model's own"
    )
    system = click.option("--system", metavar="TEXT", help="system message before the questions")
    return system(template(command))


@click.command(
    short_help="Answer prompts with a model.",
    context_settings={"max_content_width": 100},
)
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@click.option("--raw", is_flag=True, help="continue the text as it is, without a chat template")
@click.option("--json", "as_json", is_flag=True, help="print one JSON document at the end")
@click.option(
    "--batch-file", metavar="FILE", help="answer each line of a text or .jsonl file, into --output"
)
@click.option(
    "--output", metavar="FILE.jsonl", help="results of --batch-file; a run goes on where one ended"
)
@click.option(
    "--trace", metavar="FILE.json", help="draw steps, requests and workers for Perfetto or Chrome"
)
@chat_options
@sampling_options
@configuration_options
def generate(
    prompts: tuple[str, ...],
    raw: bool,
    as_json: bool,
    batch_file: str | None,
    output: str | None,
    **options: Any,
) -> None:
    """Answer each PROMPT, a question, through the model's chat template; - reads it from standard
    input.

    Only the answer goes to standard output, as it is generated. What was chosen, and all else, goes
    to standard error.
    """
    if batch_file is None and not prompts:
        raise click.MissingParameter(param_hint="'PROMPT...'", param_type="argument")
    if batch_file is None and output is not None:
        raise click.UsageError(
            "--output is for --batch-file; the answers of PROMPT go to standard output"
        )
    if batch_file is not None and (prompts or as_json):
        raise click.UsageError("--batch-file goes with neither PROMPT nor --json")
    with interruptible():
        if batch_file is not None:
            from hardpoint_engine.cli import batch_command

            code = batch_command.run(options, batch_file=batch_file, output=output, raw=raw)
        else:
            from hardpoint_engine.cli.generate_command import run

            code = run(prompts, options, raw=raw, as_json=as_json)
    click.get_current_context().exit(code)


@click.command(
    short_help="Talk with a model.",
    context_settings={"max_content_width": 100},
)
@chat_options
@sampling_options
@configuration_options
def chat(**options: Any) -> None:
    """Answer each line of standard input through the model's chat template, and keep the turns.

    At a terminal, /help lists the few commands; Ctrl-C stops the answer, Ctrl-D ends. Only answers
    go to standard output. A conversation that outgrows --max-model-len loses its oldest turns.
    """
    with interruptible():
        from hardpoint_engine.cli.chat_command import run

        code = run(options)
    click.get_current_context().exit(code)
