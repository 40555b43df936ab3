"""Generates for every prompt of a file without a result, several at a time, and adds the results in order."""

import asyncio
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

import msgspec
from tqdm import tqdm

from octavo.batch.escapes import escape
from octavo.batch.prompts import BatchPrompt, Fingerprint, read_again, read_prompts
from octavo.batch.results import Results, check_same_run
from octavo.errors import CommandError, GenerationFailedError
from octavo.protocol.process import paragraph
from octavo.python.outputs import RequestOutput

# Errors of one prompt alone: it is too long, or the engine gave it up.
NO_ANSWER = (ValueError, GenerationFailedError)


class Generate(Protocol):
    """Returns the finished answers to a prompt. Raises one of NO_ANSWER if it cannot be answered."""

    async def __call__(self, prompt: BatchPrompt) -> RequestOutput: ...


class Batch:
    """One file of prompts, its results, and how many prompts there are."""

    def __init__(self, prompts: Path, results: Results, parameters: Mapping[str, Any]) -> None:
        """Read all prompts once. Raises CommandError if one is wrong, or if the results are of another run."""
        self._prompts, self._results = prompts, results
        begun = results.begun
        if begun is not None:
            check_same_run(results.path, begun, parameters)
        fingerprint = Fingerprint()
        for prompt in read_prompts(prompts):
            fingerprint.add(prompt)
            if (
                begun is not None
                and fingerprint.num_prompts == begun.num_prompts
                and fingerprint.digest != begun.digest
            ):
                raise _other_prompts(results.path, prompts)
        self.num_prompts, self._fingerprint = fingerprint.num_prompts, fingerprint
        if begun is not None and self.num_prompts < begun.num_prompts:
            raise _other_prompts(results.path, prompts)
        results.belong_to(self.num_prompts, fingerprint.digest, parameters)

    @property
    def num_done(self) -> int:
        return self._results.num_done

    @property
    def num_failed(self) -> int:
        """How many finished prompts have an error instead of an answer, also from earlier runs of the command."""
        return self._results.num_failed

    @property
    def num_left(self) -> int:
        return self.num_prompts - self.num_done

    async def run(self, generate: Generate, window: int) -> None:
        """Generate for the prompts without a result, at most `window` of them at a time.

        If this is cancelled, or an error other than NO_ANSWER ends it, the results before the first missing one are
        kept. Raises CommandError as soon as the file has another prompt than at the first reading.
        """
        running: deque[tuple[BatchPrompt, asyncio.Task[RequestOutput]]] = deque()
        left = islice(read_again(self._prompts, self._fingerprint), self._results.num_done, None)
        with tqdm(total=self.num_prompts, initial=self._results.num_done, unit="prompt", disable=None) as bar:
            try:
                for prompt in left:
                    if len(running) == window:
                        await self._add_first(running, bar)
                    running.append((prompt, asyncio.ensure_future(generate(prompt))))
                while running:
                    await self._add_first(running, bar)
            finally:
                while running and _has_result(running[0][1]):
                    await self._add_first(running, bar)
                for _, task in running:
                    task.cancel()
                await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    async def _add_first(self, running: "deque[tuple[BatchPrompt, asyncio.Task[RequestOutput]]]", bar: Any) -> None:
        """Wait for the result of the first running prompt, add it, and then remove the prompt from `running`."""
        prompt, task = running[0]
        await asyncio.wait([task])
        try:
            answer: RequestOutput | str = task.result()
        except NO_ANSWER as error:
            answer = str(error)
            tqdm.write(f"octavo: {self._prompts}, line {prompt.line}: {paragraph(answer)}", file=sys.stderr)
        line = result_line(self._results.path.suffix, self._results.num_done, prompt, answer)
        self._results.add(line, failed=isinstance(answer, str))
        running.popleft()
        bar.update()


def result_line(suffix: str, index: int, prompt: BatchPrompt, answer: RequestOutput | str) -> str:
    """Return the line of one result, without a line end. `answer` is the message of an error if the prompt failed."""
    if suffix == ".txt":
        return "" if isinstance(answer, str) else escape(answer.outputs[0].text)
    record = {"index": index, **msgspec.to_builtins(prompt.asked)}
    if isinstance(answer, str):
        record["error"] = answer
    else:
        record |= asdict(answer) | {"prompt": answer.prompt}
    return msgspec.json.encode(record).decode()


def _has_result(task: "asyncio.Task[RequestOutput]") -> bool:
    return task.done() and not task.cancelled() and isinstance(task.exception(), (*NO_ANSWER, NoneType))


def _other_prompts(results: Path, prompts: Path) -> CommandError:
    return CommandError(
        f"{results} has results of other prompts than those of {prompts}, which may have grown since, but not changed."
        " Give another --output-path, or --overwrite"
    )
