"""A file of prompts and its results: what is read, in which order results come, and what an interruption leaves."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.batch.escapes import escape, unescape
from octavo.batch.prompts import BatchPrompt, read_prompts
from octavo.batch.results import open_results
from octavo.batch.run import Batch
from octavo.cli import main
from octavo.errors import CommandError, GenerationError, GenerationFailedError
from octavo.python.outputs import CompletionOutput, RequestOutput

PARAMETERS = {"model": "tiny", "max_tokens": 20}
WINDOW = 8


class Interrupted(BaseException):
    """Ends a run as KeyboardInterrupt does, which would end the tests."""


class Echo:
    """Answers prompts with themselves, after waits that mix up their order; `refuse` names one that cannot be."""

    def __init__(
        self, refuse: str = "", interrupt_after: int | None = None, refusal: type[Exception] = ValueError
    ) -> None:
        self.refuse, self.interrupt_after, self.refusal = refuse, interrupt_after, refusal
        self.num_running = self.most_running = self.num_asked = 0
        self._random = random.Random(5)

    async def __call__(self, prompt: BatchPrompt) -> RequestOutput:
        self.num_asked += 1
        if self.num_asked == self.interrupt_after:
            raise Interrupted
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(self._random.randrange(30)):
            await asyncio.sleep(0)
        self.num_running -= 1
        text = prompt.asked.prompt or str(prompt.asked.messages)
        if text == self.refuse:
            raise self.refusal("it is too long")
        output = CompletionOutput(0, f"{text}!", [1, 2], None, None, "length")
        return RequestOutput(str(prompt.line), text, [3], [output], 0)


def run(source: Path, target: Path, echo: Callable[..., Any], *, overwrite: bool = False, **parameters: Any) -> Batch:
    with open_results(target, overwrite=overwrite) as results:
        batch = Batch(source, results, PARAMETERS | parameters)
        asyncio.run(batch.run(echo, WINDOW))
        return batch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"第{i}页 of a\\nbook\n" if i % 20 else " \n" for i in range(1, 61)), encoding="utf-8")
    return path


@pytest.fixture
def expected(source: Path) -> str:
    return "".join(f"{line}!\n" for line in source.read_text().splitlines() if line.strip())


@pytest.mark.parametrize("text", ["a\nb\r\n", "C:\\new\\path", "\\n \\\\", "\x85\u2028\x0b", "\\u2028 \\d", "", "🫠\t"])
def test_a_text_is_one_line_and_comes_back(text: str) -> None:
    assert len(f"{escape(text)}.".splitlines()) == 1
    assert unescape(escape(text)) == text


def test_a_backslash_before_anything_else_is_a_backslash() -> None:
    assert unescape(r"\d+ \alpha C:\temp \u0041") == r"\d+ \alpha C:\temp \u0041"


def test_lines_are_read_back_and_blank_ones_skipped(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\\ntwo\r\n\r\n  \nthree \u2028 x".encode())
    assert [(prompt.line, prompt.asked.prompt) for prompt in read_prompts(path)] == [
        (1, "one\ntwo"),
        (4, "three \u2028 x"),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", "max_tokens": 5}', "line 2: Object contains unknown field `max_tokens`"),
        (b'{"prompt": "a", "messages": []}', "line 2: a line has either prompt or messages"),
        (b'{"id": 7}', "line 2: a line has either prompt or messages"),
        (b'{"messages": [{"role": "robot", "content": "a"}]}', "line 2: Invalid enum value 'robot'"),
        (b'{"prompt": "a"', "line 2: Input data was truncated"),
        (b"\xff", "line 2 is not UTF-8 (byte 1)"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(CommandError) as error:
        list(read_prompts(path))
    assert said in str(error.value)


def test_results_come_in_order_with_a_bounded_number_under_way(source: Path, expected: str) -> None:
    target, echo = source.with_name("results.txt"), Echo()
    batch = run(source, target, echo)
    assert target.read_text() == expected
    assert (batch.num_prompts, batch.num_left, batch.num_failed) == (57, 0, 0)
    assert echo.most_running <= WINDOW
    assert echo.num_asked == 57


@pytest.mark.parametrize("after", [1, 2, 20, 57])
def test_an_interrupted_run_goes_on_where_it_was(after: int, source: Path, expected: str) -> None:
    target = source.with_name("results.txt")
    with pytest.raises(Interrupted):
        run(source, target, Echo(interrupt_after=after))
    begun = target.read_text()
    assert expected.startswith(begun)
    assert begun == "" or begun.endswith("\n")
    second = Echo()
    run(source, target, second)
    assert target.read_text() == expected
    assert second.num_asked == 57 - begun.count("\n")


@pytest.mark.parametrize("num_bytes", [0, 1, 300, 301, 302, 303, 304, 305])
def test_a_last_line_that_a_kill_tore_is_written_anew(num_bytes: int, source: Path, expected: str) -> None:
    target = source.with_name("results.txt")
    run(source, target, Echo())
    target.write_bytes(expected.encode()[:num_bytes])
    run(source, target, Echo())
    assert target.read_text() == expected


def test_what_is_done_is_not_done_again(source: Path, expected: str) -> None:
    target, second = source.with_name("results.txt"), Echo()
    run(source, target, Echo())
    assert run(source, target, second).num_left == 0
    assert second.num_asked == 0
    assert target.read_text() == expected


def test_prompts_may_be_added_at_the_end(source: Path, expected: str) -> None:
    target, second = source.with_name("results.txt"), Echo()
    run(source, target, Echo())
    source.write_text(source.read_text() + "more\n")
    run(source, target, second)
    assert target.read_text() == expected + "more!\n"
    assert second.num_asked == 1


@pytest.mark.parametrize(("index", "now", "num_asked"), [(30, ["another"], 30), (30, [], 30), (0, ["other", "s"], 0)])
def test_prompts_that_change_under_a_run_end_it(
    index: int, now: list[str], num_asked: int, source: Path, expected: str
) -> None:
    target, echo, before = source.with_name("results.txt"), Echo(), source.read_text()
    with open_results(target) as results:
        batch = Batch(source, results, PARAMETERS)
        kept = [line for line in before.splitlines() if line.strip()][:index]
        source.write_text("\n".join([*kept, *now]))
        with pytest.raises(CommandError, match=f"changed while it was worked on: prompt {index + 1} is not there"):
            asyncio.run(batch.run(echo, WINDOW))
        assert batch.num_done == target.read_text().count("\n")
    assert echo.num_asked <= num_asked
    assert expected.startswith(target.read_text())
    source.write_text(before)
    run(source, target, Echo())
    assert target.read_text() == expected


def test_prompts_that_are_added_under_a_run_are_for_the_next(source: Path, expected: str) -> None:
    target = source.with_name("results.txt")
    with open_results(target) as results:
        batch = Batch(source, results, PARAMETERS)
        source.write_text(source.read_text() + "more\n")
        asyncio.run(batch.run(Echo(), WINDOW))
    assert target.read_text() == expected
    run(source, target, Echo())
    assert target.read_text() == expected + "more!\n"


def test_results_of_other_prompts_or_parameters_are_left_alone(source: Path, expected: str) -> None:
    target = source.with_name("results.txt")
    run(source, target, Echo())
    with pytest.raises(CommandError, match="begun with max_tokens 20, and now it is 200"):
        run(source, target, Echo(), max_tokens=200)
    with pytest.raises(CommandError, match="begun with temperature unset, and now it is 0"):
        run(source, target, Echo(), temperature=0)
    for other in ("another\n" + source.read_text(), "only one\n"):
        source.write_text(other)
        with pytest.raises(CommandError, match="has results of other prompts"):
            run(source, target, Echo())
    assert target.read_text() == expected
    run(source, target, Echo(), overwrite=True)
    assert target.read_text() == "only one!\n"


def test_where_the_model_comes_from_is_remembered(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = source.with_name("results.txt")
    with open_results(target) as results:
        Batch(source, results, {"model": "org/x"})
        results.add("done")
    command = ["generate", "org/x", "--use-modelscope", "--input-path", str(source), "--output-path", str(target)]
    assert main(command) == 1
    assert "begun with use_modelscope unset, and now it is true" in capsys.readouterr().err


def test_a_run_goes_on_however_the_same_model_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left to generate, so that no model is started."""
    monkeypatch.chdir(source.parent)
    (source.parent / "model").mkdir()
    (source.parent / "mine.jinja").touch()
    paths = (["./model"], ["model/"], ["--model", str(source.parent / "model")])
    template = [["--chat-template", name] for name in ("mine.jinja", str(source.parent / "mine.jinja"))]
    same = (
        ("SmolLM2-135M-Instruct", ([], ["SmolLM2-135M-Instruct"], ["--model", "SmolLM2-135M-Instruct"])),
        (str(source.parent / "model"), paths),
        ("org/name", (["org/name", *template[0]], ["org/name", *template[1]])),
    )
    for number, (name, ways) in enumerate(same):
        target = source.with_name(f"results{number}.txt")
        for way in ways:
            command = ["generate", *way, "--input-path", str(source), "--output-path", str(target)]
            if not target.exists():
                parameters = {"model": name} | ({"chat_template": template[1][1]} if len(way) > 2 else {})
                with open_results(target) as results:
                    for _ in range(Batch(source, results, parameters).num_left):
                        results.add("done")
            assert main(command) == 0, capsys.readouterr().err
            begun = json.loads(target.with_name(target.name + ".run.json").read_text())
            assert begun["parameters"]["model"] == name
    (source.parent / "SmolLM2-135M-Instruct").mkdir()
    command = ["generate", "SmolLM2-135M-Instruct", "--input-path", str(source), "--output-path", "results0.txt"]
    assert main(command) == 1
    assert f'and now it is "{source.parent}/SmolLM2-135M-Instruct"' in capsys.readouterr().err


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = str(tmp_path / f"{'x' * 300}.txt")
    assert main(["generate", "--input-path", long, "--output-path", str(tmp_path / "results.txt")]) == 1
    assert f"octavo: {long} cannot be looked at: File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["precious\n", "first\nlast, without an end of line", "one line without"])
def test_a_file_that_is_nobodys_is_left_alone(content: str, source: Path) -> None:
    target = source.with_name("results.txt")
    target.write_text(content)
    with pytest.raises(CommandError, match="is there already and not known to be of this command"):
        run(source, target, Echo())
    assert target.read_text() == content


def test_a_file_that_took_the_place_of_results_is_left_alone(source: Path) -> None:
    target = source.with_name("results.txt")
    run(source, target, Echo())
    target.write_text("mine\n" * 58 + "and mine")
    with pytest.raises(CommandError, match="is there already and not known to be of this command"):
        run(source, target, Echo())
    target.write_text("mine\nand mine")
    with pytest.raises(CommandError, match="begun with max_tokens"):
        run(source, target, Echo(), max_tokens=200)
    assert target.read_text() == "mine\nand mine"


def test_overwriting_begins_once_the_prompts_are_known_to_be_right(source: Path, expected: str) -> None:
    target = source.with_name("results.txt")
    run(source, target, Echo())
    prompts = source.read_bytes()
    source.write_bytes(prompts + b"\xff\n")
    with pytest.raises(CommandError, match="is not UTF-8"):
        run(source, target, Echo(), overwrite=True)
    assert target.read_text() == expected
    source.write_bytes(b"")
    assert run(source, target, Echo(), overwrite=True).num_prompts == 0
    assert target.read_text() == ""


def test_two_runs_do_not_write_one_file(source: Path) -> None:
    target = source.with_name("results.txt")
    with open_results(target), pytest.raises(CommandError, match="being written by another"), open_results(target):
        pass


@pytest.mark.parametrize("refusal", [ValueError, GenerationFailedError])
def test_a_prompt_that_cannot_be_answered_keeps_its_place(
    refusal: type[Exception], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = "第3页 of a\nbook"
    batch = run(source, source.with_name("results.txt"), Echo(refuse=refused, refusal=refusal))
    lines = source.with_name("results.txt").read_text().splitlines()
    assert len(lines) == 57
    assert [index for index, line in enumerate(lines) if not line] == [2]
    assert batch.num_failed == 1
    assert "line 3: it is too long" in capsys.readouterr().err


def test_a_model_that_is_gone_ends_the_run_with_what_is_done(source: Path, expected: str) -> None:
    target = source.with_name("results.txt")
    with pytest.raises(GenerationError, match="it is too long"):
        run(source, target, Echo(refuse="第30页 of a\nbook", refusal=GenerationError))
    assert target.read_text() == "".join(expected.splitlines(keepends=True)[:28])
    run(source, target, Echo())
    assert target.read_text() == expected


@pytest.mark.parametrize("num_lines", [2, 3, 57])
def test_who_could_not_be_answered_in_an_earlier_life_is_counted_once(num_lines: int, source: Path) -> None:
    target, refused = source.with_name("results.txt"), "第3页 of a\nbook"
    run(source, target, Echo(refuse=refused))
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:num_lines]))
    assert run(source, target, Echo(refuse=refused)).num_failed == 1
    assert run(source, target, Echo()).num_failed == 1


def test_records_have_what_was_asked_and_all_that_is_known(tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    messages = [{"role": "user", "content": "你好"}]
    asked = [{"prompt": "a\nb", "id": "x-1"}, {"messages": messages}, {"prompt": "refused"}]
    source.write_text("\n\n".join(map(json.dumps, asked)))
    run(source, target, Echo(refuse="refused"))
    first, second, third = map(json.loads, target.read_text().splitlines())
    assert (first["index"], first["id"], first["prompt"]) == (0, "x-1", "a\nb")
    assert first["outputs"][0] == {
        "index": 0,
        "text": "a\nb!",
        "token_ids": [1, 2],
        "logprobs": None,
        "cumulative_logprob": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert first["prompt_token_ids"] == [3]
    assert second["messages"] == messages
    assert third == {"index": 2, "prompt": "refused", "error": "it is too long"}
