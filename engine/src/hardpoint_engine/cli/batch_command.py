"""``hardpoint generate --batch-file``, carried out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from hardpoint.default_model import with_model
from hardpoint.errors import HardpointError, InvalidRequestError

from hardpoint_engine.batch.batch_run import BatchRun
from hardpoint_engine.batch.prompt_file import BatchPrompt, PromptFile
from hardpoint_engine.batch.result_file import ResultFile
from hardpoint_engine.batch.run_identity import run_identity
from hardpoint_engine.cli.answer_stream import answer_table, metrics_table
from hardpoint_engine.cli.command_options import sampling_of
from hardpoint_engine.cli.progress import Progress
from hardpoint_engine.cli.starting import (
    configuration,
    conversation_options,
    local_error,
    log_to_standard_error,
    tell,
    tell_choice,
)
from hardpoint_engine.cli.tracing import tracing
from hardpoint_engine.front import SHUTDOWN_TIMEOUT, Front
from hardpoint_engine.outputs import RequestOutput


def run(options: Mapping[str, Any], *, batch_file: str, output: str | None, raw: bool) -> int:
    """Answer what has no result yet; return 1 if a line failed, now or before.

    What can be refused without the model is refused before it is loaded; nothing is loaded if
    nothing is left to do.
    """
    if output is None:
        raise InvalidRequestError(
            "--batch-file needs --output FILE.jsonl for its results", field="output", value=None
        )
    config = with_model(configuration(options))
    sampling = sampling_of(options, seeded=config.model.seed is not None)
    conversation = conversation_options(options, raw=raw)
    log_to_standard_error(config)
    prompts = PromptFile(batch_file, sampling)
    if os.path.exists(output) and os.path.samefile(output, batch_file):  # noqa: PTH110, PTH121
        raise InvalidRequestError(
            f"--output {output} is the file of prompts; name another", field="output", value=output
        )
    run_of = run_identity(config, sampling, conversation)
    with ResultFile(output, run=run_of, lines=prompts.count_lines()) as results:
        total = missing = 0
        for line in prompts:
            total += 1
            missing += not results.has(line)
        before = total - missing
        if before:
            tell(f"{before} of {total} prompts have their result in {output}")
        if missing:
            progress = Progress(total, before)
            chosen = partial(tell_choice, sampling=sampling)
            try:
                with tracing(options["trace"]) as watch:
                    front = Front(config, chat=not raw, chosen=chosen)
                    try:
                        with watch(front.core):
                            BatchRun(
                                front, prompts, results,
                                conversation=conversation, show=_show, told=progress.add,
                            ).run()  # fmt: skip
                    finally:
                        front.shutdown(SHUTDOWN_TIMEOUT)
            except HardpointError as error:
                raise local_error(error) from None
            finally:
                progress.close()
        failed = results.failed
        tell(
            f"{total} prompts, {failed} failed: {output}"
            if failed
            else f"{total} prompts: {output}"
        )
    return int(failed > 0)


def _show(result: RequestOutput, prompt: BatchPrompt) -> Mapping[str, Any]:
    return {
        "outputs": [
            {"index": answer.index, **answer_table(result, answer, prompt.sampling)}
            for answer in result.outputs
        ],
        "metrics": metrics_table(result.metrics),
    }
