"""`funcrt batch`: one result line per prompt, in order, whatever happens to the process."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from funcrt.cli.jobs import Digest, LineReader
from funcrt.cli.results import Results, open_results
from funcrt.errors import InputError
from tests.commands import command, run, run_here, save_model

import pytest

PLAN = ("--batch", "1,4", "--tokens", "16", "--capacity", "64")
WORDS = ["Hello", "b", "some more words", "x" * 20, "Why?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("batch") / "model")


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def many(path: Path, count: int) -> Path:
    """Prompts of distinct lengths and limits."""
    return write(
        path,
        *({"prompt": WORDS[i % 5] * (1 + i % 2), "max_tokens": 3 + i % 11} for i in range(count)),
    )


def test_every_line_gets_what_generate_gives(model: Path, tmp_path: Path) -> None:
    prompts = write(
        tmp_path / "in.jsonl",
        {"prompt": "Hello", "id": "first"},
        "Hello",
        {"messages": [{"role": "user", "content": "Hello"}], "id": 3},
        {"prompt": "Hello", "max_tokens": 2, "id": None},
        {"prompt": [40, 41, 42]},
        {"prompt": "Hello", "temperature": 5.0, "seed": 7, "stop": "q", "top_k": None},
    )
    options = (*PLAN, "--max-tokens", "9", "--json")
    done = run_here("batch", model, prompts, tmp_path / "out.jsonl", *options)
    assert done.returncode == 0, done.stderr
    first, plain, chat, short, ids, hot = read(tmp_path / "out.jsonl")
    alone = json.loads(
        run_here("generate", model, "--prompt", "Hello", "--max-tokens", "9", "--json").stdout
    )
    assert first == {
        "index": 0,
        "input": first["input"],
        "id": "first",
        "text": alone["text"],
        "finish_reason": alone["finish_reason"],
        "prompt_tokens": alone["prompt_tokens"],
        "completion_tokens": alone["generation_tokens"],
    }
    assert [line["index"] for line in (plain, chat, short, ids, hot)] == [1, 2, 3, 4, 5]
    assert plain["text"] == chat["text"] == first["text"]
    assert "id" not in plain
    assert chat["id"] == 3
    assert short["id"] is None
    assert (short["text"], short["completion_tokens"]) == (first["text"][:2], 2)
    assert ids["prompt_tokens"] == 3
    settings = ("--temp", "5", "--seed", "7", "--stop", "q", "--max-tokens", "9", "--json")
    alone = json.loads(run_here("generate", model, "--prompt", "Hello", *settings).stdout)
    assert (hot["text"], hot["finish_reason"]) == (alone["text"], alone["finish_reason"])
    facts = json.loads(done.stdout)
    assert facts["lines"] == 6
    assert facts["kept"] == facts["failed"] == 0
    assert facts["generation_tokens"] == sum(
        line["completion_tokens"] for line in read(tmp_path / "out.jsonl")
    )


BAD = [
    (b"", "the line is empty"),
    (b"{bad", "not valid JSON"),
    (b'{"prompt": "a", "seed": NaN}', "it holds NaN"),
    (b'{"prompt": "a", "id": 1e999}', "1e999 is too large"),
    (b"\xff\xfe", "not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
    (b"[1, 2]", "expected a JSON object or a string, got [1, 2]"),
    (b"{}", 'expected "prompt" or "messages"'),
    (b'{"prompt": "a", "messages": []}', "not both"),
    (b'{"prompt": 5}', "expected text or a list of ids, got 5"),
    (b'{"prompt": null}', 'expected "prompt" or "messages"'),
    (b'{"prompt": ""}', ""),
    (b'{"prompt": []}', "empty"),
    (b'{"prompt": ["a"]}', "ids"),
    (b'{"prompt": [96]}', "vocabulary"),
    (b'{"messages": "hi"}', "expected a list of messages"),
    (b'{"messages": [{"content": "hi"}]}', "a chat is a list"),
    (b'{"prompt": "a", "on_chunk": 1}', "unknown key 'on_chunk'"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    (b'{"prompt": "a", "temperature": -1}', "temperature"),
    (b'{"prompt": "a", "stop": ""}', "stop"),
    (b'{"prompt": "a", "logprobs": 3}', "logprobs: expected true or false"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "token ids as keys"),
    (b'{"prompt": "\\ud800", "id": "\\ud800"}', "not valid Unicode"),
    (json.dumps({"prompt": "a" * 100}).encode(), "largest capacity is 63"),
]


def test_bad_lines_say_why_and_the_others_go_on(model: Path, tmp_path: Path) -> None:
    good = b'{"prompt": "Hello", "max_tokens": 2}\n'
    lines = [good + line + b"\n" for line, _ in BAD]
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines) + good + b"\n \n\r\n")
    command = ("batch", model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--raw", *PLAN)
    for _ in range(2):  # the second time everything is there already, and says the same
        done = run_here(*command)
        assert done.returncode == 1
        failed = len(BAD)
        assert done.stderr.splitlines()[-1] == (
            f"error: {failed} of {2 * failed + 1} lines failed: "
            f'see "error" in {tmp_path / "out.jsonl"}'
        )
    results = read(tmp_path / "out.jsonl")
    assert len(results) == 2 * len(BAD) + 1
    assert {line["completion_tokens"] for line in results[::2]} == {2}
    for result, (line, words) in zip(results[1::2], BAD, strict=True):
        assert words in result["error"], line
        assert "\n" not in result["error"]
        assert "text" not in result
    assert results[2 * len(BAD) - 3]["id"] == "\ud800"


def test_logprobs_come_with_their_tokens(model: Path, tmp_path: Path) -> None:
    lines = (
        {"prompt": "Hello"},
        {"prompt": "Hello", "logprobs": False},
        {"prompt": "Hello", "top_logprobs": 2},
    )
    prompts = write(tmp_path / "in.jsonl", *lines)
    out = tmp_path / "out.jsonl"
    done = run_here("batch", model, prompts, out, "--logprobs", "--max-tokens", "3", *PLAN)
    assert done.returncode == 0, done.stderr
    asked, off, top = read(out)
    assert len(asked["tokens"]) == len(asked["logprobs"]) == 3
    assert all(-10 < logprob < 0 for logprob in asked["logprobs"])
    assert "top_logprobs" not in asked
    assert not off.keys() & {"tokens", "logprobs", "top_logprobs"}
    best = [step[0] for step in top["top_logprobs"]]
    assert [token for token, _ in best] == asked["tokens"] == top["tokens"]
    assert [logprob for _, logprob in best] == top["logprobs"]
    assert {len(step) for step in top["top_logprobs"]} == {2}


# --- interruptions --------------------------------------------------------------------------------


def test_killed_at_any_time_it_goes_on_to_the_same_file(model: Path, tmp_path: Path) -> None:
    prompts = many(tmp_path / "in.jsonl", 150)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    options = ("--temp", "0.8", "--seed", "3", *PLAN)
    assert run("batch", model, prompts, whole, *options).returncode == 0
    dice, kept = random.Random(0), 0
    for _ in range(4):
        process = subprocess.Popen(
            command("batch", model, prompts, out, *options), stderr=subprocess.DEVNULL
        )
        wanted = size(out) + dice.randrange(2000)
        while size(out) <= wanted and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.wait()
        there = out.read_bytes()
        assert whole.read_bytes().startswith(there)
        assert there.count(b"\n") >= kept
        kept = there.count(b"\n")
    assert 0 < kept < 150
    done = run("batch", model, prompts, out, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == whole.read_bytes()
    assert json.loads(done.stdout)["kept"] == kept


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_file_cut_at_any_byte_is_continued(tmp_path: Path) -> None:
    answers = [{"text": "a\nb"}, {"error": "no"}, {"text": "ü" * 30}]
    path = tmp_path / "out.jsonl"

    def complete() -> int:
        with open_results(path, overwrite=False) as results:
            for index, facts in enumerate(answers):
                if not results.holds(index, "0123456789abcdef"):
                    results.add(index, "0123456789abcdef", facts)
            results.finish(len(answers))
            assert results.failed == 1
            return results.kept

    assert complete() == 0
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        for rest in (b"", b"\0" * 7):
            path.write_bytes(whole[:cut] + (rest if cut < len(whole) else b""))
            assert complete() == sum(end <= cut for end in ends)
            assert path.read_bytes() == whole


def assert_foreign(results: Results) -> None:
    with pytest.raises(InputError, match="other input"):
        all(results.holds(index, "0123456789abcdef") for index in range(2))


@pytest.mark.parametrize(
    "foreign",
    [
        b"my diary",
        b"my diary\n",
        b'{"index": 0, "input": "0000000000000000", "text": ""}\n',
        b'{"index": 1, "input": "0123456789abcdef", "text": ""}\n',
        b'{"index": 0, "input": "0123456789abcdef", garbage\n',
        b'{"index": 0, "input": "0123456789abcdef", "text": ""}\nmy diary',
        b'{"index": 0, "input": "0123456789abcdef", "text": ""}\n{"index": 2',
        b"\n",
    ],
)
def test_what_does_not_belong_here_is_never_touched(foreign: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(foreign)
    with open_results(path, overwrite=False) as results:
        assert_foreign(results)
    assert path.read_bytes() == foreign


def test_results_of_other_input_or_options_are_refused(model: Path, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "in.jsonl", "a", "b", "c"), tmp_path / "out.jsonl"
    options = ("--max-tokens", "2", *PLAN)
    assert run_here("batch", model, prompts, out, *options).returncode == 0
    results = out.read_bytes()

    def refused(*options: str, line: int) -> None:
        done = run_here("batch", model, prompts, out, *options)
        assert done.returncode == 1
        assert f"first at line {line})" in done.stderr
        assert "--overwrite" in done.stderr
        assert out.read_bytes() == results

    refused(*options, "--temp", "1", line=1)
    refused("--max-tokens", "3", *PLAN, line=1)
    write(prompts, "a", "B", "c")
    refused(*options, line=2)
    write(prompts, "a", "b")
    refused(*options, line=3)
    write(prompts, "a", "b", "c", "d")  # only more of it
    done = run_here("batch", model, prompts, out, *options, "--json", "--capacity", "128")
    assert json.loads(done.stdout)["kept"] == 3
    assert out.read_bytes().startswith(results)
    write(prompts, "new")
    assert run_here("batch", model, prompts, out, *options, "--overwrite").returncode == 0
    assert [line["index"] for line in read(out)] == [0]


def test_a_bundle_continues_what_its_model_began(model: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "model.funcrt"
    sizes = ("--batch", "1", "--tokens", "16", "--capacity", "64")
    assert run_here("export", model, bundle, *sizes).returncode == 0
    prompts, out = write(tmp_path / "in.jsonl", "a", "b"), tmp_path / "out.jsonl"
    assert run_here("batch", model, prompts, out, "--max-tokens", "3", *sizes).returncode == 0
    write(prompts, "a", "b", "c")
    done = run_here("batch", bundle, prompts, out, "--max-tokens", "3", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["lines"], facts["kept"]) == (3, 2)
    refused = run_here("batch", bundle, prompts, out, *sizes)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    assert "fixed when a bundle is exported" in refused.stderr
    other = run_here(
        "batch", model, prompts, out, "--max-tokens", "3", *sizes, "--dtype", "bfloat16"
    )
    assert "another model" in other.stderr


def test_ctrl_c_leaves_what_is_done(model: Path, tmp_path: Path) -> None:
    prompts, out = many(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    process = subprocess.Popen(
        command("batch", model, prompts, out, *PLAN), stderr=subprocess.PIPE, text=True
    )
    while not size(out):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    written = read(out)
    assert [line["index"] for line in written] == list(range(len(written)))
    assert 0 < len(written) < 400
    *_, told, last = said.splitlines()
    assert told == f"what is done is in {out}: the same command goes on from there"
    assert last == "interrupted"


# --- files and pipes ------------------------------------------------------------------------------


def test_no_lines_no_results(model: Path, tmp_path: Path) -> None:
    for nothing in (b"", b"\n\n", b" \r\n"):
        (tmp_path / "in.jsonl").write_bytes(nothing)
        done = run_here("batch", model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", *PLAN)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_standard_input_and_output(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--max-tokens", "2", *PLAN)
    assert run("batch", model, "-", out, *options, text='"a"\n"b"').returncode == 0
    piped = run("batch", model, "-", "-", *options, text='"a"\n"b"')
    assert piped.stdout == out.read_text("utf-8")
    again = run("batch", model, "-", out, *options, text='"a"\n"b"\n"c"\n')
    assert again.returncode == 1
    assert "--resume" in again.stderr
    more = run("batch", model, "-", out, *options, "--resume", "--json", text='"a"\n"b"\n"c"\n')
    assert json.loads(more.stdout)["kept"] == 2
    assert out.read_text("utf-8").startswith(piped.stdout)
    assert len(read(out)) == 3
    assert run("batch", model, "-", out, *options, "--overwrite", text='"c"').returncode == 0
    assert len(read(out)) == 1


def test_results_come_while_the_input_is_still_open(model: Path) -> None:
    process = subprocess.Popen(
        command("batch", model, "-", "-", "--max-tokens", "2", *PLAN),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    for index in range(2):
        process.stdin.write('"a"\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["index"] == index
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_paths_that_cannot_be(model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", "a")
    before = prompts.read_bytes()
    for arguments, words in (
        ((tmp_path / "none.jsonl", tmp_path / "out.jsonl"), "none.jsonl"),
        ((tmp_path, tmp_path / "out.jsonl"), "expected a file"),
        ((prompts, tmp_path), "is a folder"),
        ((prompts, prompts, "--overwrite"), "both input and output"),
        ((prompts, tmp_path / "no" / "out.jsonl"), "No such file"),
    ):
        done = run_here("batch", model, *arguments, *PLAN)
        assert done.returncode == 1
        assert words in done.stderr
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1
    assert prompts.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        open_results(path, overwrite=False),
        pytest.raises(InputError, match="another process"),
        open_results(path, overwrite=True),
    ):
        pass


# --- parts ----------------------------------------------------------------------------------------


def test_lines_come_one_by_one_from_a_pipe() -> None:
    reading, writing = os.pipe()
    reader = LineReader(reading)
    assert reader.next(0) is None
    assert not reader.ended
    os.write(writing, b"\xef\xbb\xbfone\r\n\n\n tw")
    assert reader.next(0) == b"one"
    assert reader.next(0) is None  # nobody knows yet whether the empty lines are the end
    os.write(writing, b"o\nlast")
    assert [reader.next(0) for _ in range(4)] == [b"", b"", b"two", None]
    os.close(writing)
    assert reader.next(None) == b"last"
    assert reader.next(None) is None
    assert reader.ended
    os.close(reading)


def test_a_digest_is_of_the_line_and_all_that_matters() -> None:
    digests = {Digest(facts).of(line) for facts in ({"a": 1}, {"a": 2}, {}) for line in (b"", b"x")}
    assert len(digests) == 6
    assert Digest({"b": 1, "a": 2}).of(b"x") == Digest({"a": 2, "b": 1}).of(b"x")


def test_nothing_is_read_back_from_a_pipe() -> None:
    file = io.BytesIO()
    results = Results(file, "pipe", resume=False)
    assert not results.holds(0, "0")
    results.add(0, "0", {"text": "\ud800"})
    assert json.loads(file.getvalue())["text"] == "\ud800"
