"""The commands as a person runs them: output, exit codes, one-line errors."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import funcrt
from funcrt._version import __version__
from funcrt.cli.options import byte_count
from funcrt.model import Model
from tests.commands import command, run, run_here, save_model
from tests.helpers import TINY, make_params

import pytest
import typer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer whose tokens are printable characters."""
    return save_model(tmp_path_factory.mktemp("cli") / "tiny model")


@pytest.fixture(scope="session")
def bundle(folder: Path) -> Path:
    out = folder.parent / "tiny.funcrt"
    done = run(
        "export", folder, out, "--batch", "1", "--tokens", "16", "--capacity", "64", "--json"
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["folder"] == str(out)
    assert facts["imported_to_eager"] <= 2e-5
    assert set(facts["functions"]) >= {"prepare", "prefill_b1_t16_s64", "decode_b1_t1_s64"}
    return out


def test_version() -> None:
    assert run("--version").stdout.startswith(f"funcrt {__version__} (mlx ")
    assert set(json.loads(run("--version", "--json").stdout)) == {"funcrt", "mlx"}


def test_export_packs_the_cache(folder: Path, tmp_path: Path) -> None:
    config = replace(TINY, head_dim=32, num_heads=2, num_kv_heads=1)
    Model(config, make_params(config)).save(tmp_path / "model")
    plan = ("--batch", "1", "--tokens", "16", "--capacity", "64")
    out = tmp_path / "packed.funcrt"
    done = run("export", tmp_path / "model", out, *plan, "--kv-bits", "8", "--json")
    assert done.returncode == 0, done.stderr
    arrays = json.loads(run("inspect", out, "--json").stdout)["cache"]
    assert {"name": "layers.0.keys", "kind": "quantized", "shape": ["B", 1, "S", 8]}.items() <= (
        arrays[1].items()
    )
    assert "cache: quantized" in run("inspect", out).stdout
    refused = run("export", folder, tmp_path / "none", *plan, "--kv-bits", "8")
    assert (refused.returncode, refused.stderr.splitlines()[-1]) == (
        1,
        "error: kv_bits needs a head size divisible by 32, this model has 16",
    )
    assert not (tmp_path / "none").exists()


def test_generate_is_the_same_from_a_bundle_and_a_folder(folder: Path, bundle: Path) -> None:
    options = ("--prompt", "Hello", "--max-tokens", "6", "--json")
    mine, theirs = (
        json.loads(run("generate", place, *options).stdout) for place in (folder, bundle)
    )
    assert mine["tokens"] == theirs["tokens"]
    assert mine["prompt_tokens"] == len("<user>Hello<assistant>")
    assert mine["generation_tokens"] == len(mine["tokens"]) <= 6
    assert mine["finish_reason"] in ("length", "stop")


def test_generate_streams_text_and_reports_beside_it(bundle: Path) -> None:
    done = run("generate", bundle, "--prompt", "-", "--raw", "--max-tokens", "3", text="abc")
    facts = json.loads(
        run("generate", bundle, "--prompt", "abc", "--raw", "--max-tokens", "3", "--json").stdout
    )
    assert done.stdout == facts["text"] + "\n"
    assert facts["prompt_tokens"] == 3
    for line in ("Prompt: 3 tokens, ", "Generation: ", "Peak memory: "):
        assert line in done.stderr


def test_sampling_options_reach_the_model(bundle: Path) -> None:
    def tokens(*options: str) -> list[int]:
        command = ("generate", bundle, "--prompt", "abc", "--max-tokens", "12", "--json", *options)
        return list(json.loads(run_here(*command).stdout)["tokens"])

    hot = tokens("--temp", "5", "--seed", "1")
    assert hot == tokens("--temp", "5", "--seed", "1")
    assert hot != tokens("--temp", "5", "--seed", "2")
    greedy = tokens()
    assert greedy == tokens("--temp", "5", "--top-k", "1")
    assert greedy == tokens("--temp", "5", "--top-p", "0.000001")
    assert greedy == tokens("--temp", "5", "--min-p", "1")


def test_stop_and_system_prompt(bundle: Path) -> None:
    command = ("generate", bundle, "--prompt", "abc", "--max-tokens", "8", "--json")
    facts = json.loads(run_here(*command).stdout)
    last = facts["text"][3]
    cut = json.loads(run_here(*command, "--stop", last).stdout)
    assert cut["text"] == facts["text"][: facts["text"].index(last)]
    assert cut["finish_reason"] == "stop"
    with_system = json.loads(run_here(*command, "--system-prompt", "be").stdout)
    assert with_system["prompt_tokens"] == facts["prompt_tokens"] + len("<system>be")


def test_penalties_reach_the_model(bundle: Path) -> None:
    def tokens(*options: str) -> list[int]:
        command = ("generate", bundle, "--prompt", "abc", "--max-tokens", "30", "--json", *options)
        return list(json.loads(run_here(*command).stdout)["tokens"])

    plain = tokens()
    assert len(plain) > len(set(plain)), "it repeats nothing: nothing to penalize"
    for option in ("--presence-penalty", "--frequency-penalty"):
        once = tokens(option, "1e6")
        assert len(once) == len(set(once))
    prompt = {ord(letter) - 33 for letter in "<user>abc<assistant>"}
    never = tokens("--repetition-penalty", "1e6")
    assert tokens("--repetition-penalty", "1") == plain
    assert not prompt & set(never)


def test_logprobs_are_facts_where_asked_for(bundle: Path) -> None:
    command = ("generate", bundle, "--prompt", "abc", "--max-tokens", "4", "--json")
    plain, logprobs, top = (
        json.loads(run_here(*command, *options).stdout)
        for options in ((), ("--logprobs",), ("--top-logprobs", "3"))
    )
    assert not plain.keys() & {"logprobs", "top_logprobs"}
    assert len(logprobs["logprobs"]) == len(plain["tokens"])
    assert "top_logprobs" not in logprobs
    assert [step[0] for step in top["top_logprobs"]] == [
        [token, logprob] for token, logprob in zip(top["tokens"], top["logprobs"], strict=True)
    ]
    assert {len(step) for step in top["top_logprobs"]} == {3}


def test_guesses_change_nothing_but_the_facts(folder: Path) -> None:
    command = ("generate", folder, "--prompt", "abcabcabcabc", "--max-tokens", "40")
    plain = json.loads(run_here(*command, "--json").stdout)
    for guesser in ("ngram", folder):
        facts = json.loads(run_here(*command, "--json", "--speculate", guesser).stdout)
        assert facts["tokens"] == plain["tokens"]
        assert 0 < facts["accepted_tokens"] <= facts["guessed_tokens"]
    assert "accepted_tokens" not in plain
    shown = run_here(*command, "--speculate", "ngram")
    assert "\nGuesses: " in shown.stderr
    missing = run_here(*command, "--speculate", "/nowhere/at/all")
    assert (missing.returncode, len(missing.stderr.splitlines())) == (1, 1)


def test_chat_computes_only_what_is_new(folder: Path, bundle: Path) -> None:
    for place in (folder, bundle):
        talk = ("chat", place, "--max-tokens", "5", "--json")
        first, second = (
            json.loads(line) for line in run(*talk, text="Hello\nAgain\n").stdout.splitlines()
        )
        assert first["reused_tokens"] == 0
        # All but the last token of the answer, which was never put in the cache.
        cached = first["prompt_tokens"] + len(first["tokens"]) - 1
        assert second["reused_tokens"] == cached
    shown = run("chat", folder, "--max-tokens", "5", text="Hello\nAgain\n").stderr
    assert f"Prompt: {second['prompt_tokens']} tokens ({cached} reused), " in shown


def test_chat_remembers_the_conversation(bundle: Path) -> None:
    done = run("chat", bundle, "--max-tokens", "2", "--json", text="Hi\nAgain\n\nnever read\n")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["prompt_tokens"] == len("<user>Hi<assistant>")
    said = len("<user>Hi") + len("<assistant>") + len(first["text"])
    assert second["prompt_tokens"] == said + len("<user>Again<assistant>")
    assert done.returncode == 0


def test_convert_writes_what_export_reads(folder: Path, tmp_path: Path) -> None:
    done = run("convert", folder, tmp_path / "half", "--dtype", "bfloat16", "--json")
    assert json.loads(done.stdout)["bytes"] > 0, done.stderr
    again = run("convert", tmp_path / "half", tmp_path / "again")
    assert again.returncode == 0
    assert "again: " in again.stdout
    halves = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "again")]
    assert halves[0] == halves[1] < (folder / "model.safetensors").stat().st_size


def test_inspect_and_verify(bundle: Path) -> None:
    shown = run("inspect", bundle, COLUMNS="80").stdout.splitlines()
    assert any(line.split()[:2] == ["decode_greedy", "1"] for line in shown)
    assert json.loads(run("inspect", bundle, "--json").stdout)["plan"]["capacity"] == [64]
    done = run("verify", bundle, "--json")
    verdict = json.loads(done.stdout)
    assert done.returncode == 0
    assert verdict["passed"] is True
    checks = {"error", "tokens", "lengths", "padding", "poison", "chunking"}
    assert {check["check"] for check in verdict["checks"]} >= checks
    assert verdict["certificate"] == str(bundle / "certificate.json")
    said, place = run("verify", bundle).stdout.splitlines()[-2:]
    count = len(verdict["checks"])
    assert said.startswith(f"{count} of {count} checks passed on {verdict['device']} (cpu), mlx ")
    assert place == f"certificate: {bundle / 'certificate.json'}"


def test_a_damaged_bundle_is_one_line(bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.funcrt"
    broken.mkdir()
    (broken / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes())
    for arguments in (("verify",), ("inspect",), ("generate", "--prompt", "a")):
        done = run(arguments[0], broken, *arguments[1:])
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("generate", "/nowhere/at/all", "--prompt", "a"), 1, "neither an existing file"),
        (("generate", "owner/name", "--prompt", "a"), 1, "HF_HUB_OFFLINE"),
        (("convert", "/nowhere/at/all", "out"), 1, "neither an existing file"),
        (("verify", "/nowhere/at/all"), 1, "not a folder"),
        (("generate",), 2, "Missing argument"),
        (("generate", "x", "--prompt", "a", "--temp", "-1"), 2, "--temp"),
        (("generate", "x", "--prompt", "a", "--max-tokens", "0"), 2, "--max-tokens"),
        (("generate", "x", "--prompt", "a", "--temp", "nan"), 2, "--temp"),
        (("generate", "x", "--prompt", "a", "--temp", "inf"), 2, "--temp must be"),
        (("generate", "x", "--prompt", "a", "--top-p", "0"), 2, "--top-p must be"),
        (("generate", "x", "--prompt", "a", "--top-k", "2147483648"), 2, "--top-k must be"),
        (("generate", "x", "--prompt", "a", "--seed", "4294967296"), 2, "--seed must be"),
        (("generate", "x", "--prompt", "a", "--stop", ""), 2, "--stop must not be empty"),
        (("generate", "x", "--prompt", "a", "--top-logprobs", "21"), 2, "--top-logprobs"),
        (("chat", "x", "--repetition-penalty", "0"), 2, "--repetition-penalty must be"),
        (("chat", "x", "--presence-penalty", "inf"), 2, "--presence-penalty must be"),
        (("chat", "x", "--frequency-penalty", "-1e9"), 2, "--frequency-penalty must be"),
        (("batch", "x", "in", "out", "--top-p", "0"), 2, "--top-p must be"),
        (("batch", "x", "in", "out", "--memory", "much"), 2, "a size such as 8GB"),
        (("batch", "x", "in", "out", "--batch", "0"), 2, "plan batch"),
        (("batch", "x", "-", "out", "--resume", "--overwrite"), 2, "--resume"),
        (("export", "x", "y", "--batch", "1,two"), 2, "separated by commas"),
        (("export", "x", "y", "--capacity", "1"), 2, "capacity"),
        (("export", "x", "y", "--kv-bits", "3"), 2, "expected 4 or 8"),
        (("unknown",), 2, "No such command"),
    ],
)
def test_errors_are_one_line_and_wrong_usage_is_two(
    arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = run(*arguments, HF_HUB_OFFLINE="1", COLUMNS="200")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert code == 2 or len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GB", 8_000_000_000),
        ("8 gb", 8_000_000_000),
        ("512MiB", 512 << 20),
        ("1.5k", 1500),
        ("2TiB", 2 << 40),
        ("100", 100),
        ("100B", 100),
        *((bad, None) for bad in ("", "GB", "0", "0.5", "-1GB", "8XB", "8I", "1e9", "9" * 400)),
    ],
)
def test_sizes_in_bytes(text: str, count: int | None) -> None:
    if count is not None:
        assert byte_count(text) == count
        return
    with pytest.raises(typer.BadParameter, match="a size such as 8GB"):
        byte_count(text)


def test_prompts_that_cannot_run(bundle: Path) -> None:
    too_long = run("generate", bundle, "--prompt", "a" * 100, "--raw")
    assert (too_long.returncode, too_long.stderr) == (
        1,
        "error: prompt has 100 tokens, largest capacity is 63: "
        "export a larger one (--capacity 128)\n",
    )
    empty = run("generate", bundle, "--prompt", "", "--raw")
    assert empty.returncode == 1
    assert "empty" in empty.stderr
    fixed = run("generate", bundle, "--prompt", "a", "--dtype", "float16")
    assert fixed.returncode == 1
    assert "--dtype" in fixed.stderr


def test_broken_weights_are_an_error(folder: Path, tmp_path: Path) -> None:
    params = make_params(TINY)
    params["model.norm.weight"] = params["model.norm.weight"] * float("nan")
    model = funcrt.load_model(folder)
    Model(model.config, params, model.tokenizer).save(tmp_path / "broken")
    for options in ((), ("--json",)):
        done = run("generate", tmp_path / "broken", "--prompt", "a", *options)
        assert done.returncode == 1
        assert "not finite" in done.stderr


def test_converting_onto_the_source_is_refused(folder: Path) -> None:
    done = run("convert", folder, folder)
    assert done.returncode == 1
    assert "both source and target" in done.stderr


def test_names_with_markup_and_closed_outputs(bundle: Path, tmp_path: Path) -> None:
    strange = tmp_path / "x[/b] [red]y.funcrt"
    shutil.copytree(bundle, strange)
    assert "x[/b] [red]y.funcrt" in run("verify", strange).stdout
    shell = f"{sys.executable} -m funcrt inspect '{bundle}'"
    full = subprocess.run(["sh", "-c", f"{shell} >/dev/full"], capture_output=True, check=False)
    assert full.returncode == 1
    assert full.stderr.startswith(b"error: ")
    closed = subprocess.run(["sh", "-c", f"{shell} >&-"], capture_output=True, check=False)
    assert b"Traceback" not in closed.stderr


def test_text_that_is_not_unicode(bundle: Path) -> None:
    command = [sys.executable, "-m", "funcrt", "generate", str(bundle), "--prompt", b"a\xff"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: the text is not valid Unicode")


def test_unknown_config_keys_may_be_ignored(folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(folder, odd)
    config = json.loads((odd / "config.json").read_text("utf-8"))
    (odd / "config.json").write_text(json.dumps({**config, "my_switch": 1}), "utf-8")
    assert "my_switch" in run("convert", odd, tmp_path / "out").stderr
    assert run("convert", odd, tmp_path / "out", "--ignore", "my_switch").returncode == 0


def test_a_mistyped_bundle_is_not_looked_up_on_the_hub() -> None:
    done = run("generate", "exported/nope.funcrt", "--prompt", "a")
    assert "neither an existing file" in done.stderr


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupt(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C; what the process said until it ended quietly."""
    process.send_signal(signal.SIGINT)
    said, warned = process.communicate(timeout=60)
    assert process.returncode == 130
    assert warned.splitlines() == ["interrupted"]
    return said


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ctrl_c_ends_a_chat(bundle: Path) -> None:
    process = start("chat", bundle)
    assert process.stdout is not None
    assert process.stdout.read(3) == ">> "
    time.sleep(0.1)
    interrupt(process)


def test_ctrl_c_keeps_what_was_printed(tmp_path: Path) -> None:
    endless = save_model(tmp_path / "endless", ends=())
    ask = ("generate", endless, "--prompt", "abc", "--max-tokens")
    whole = run(*ask, "50").stdout.rstrip("\n")
    process = start(*ask, "2000")
    assert process.stdout is not None
    first = process.stdout.read(1)
    rest = interrupt(process)
    text = (first + rest).removesuffix("\n")
    assert rest.endswith("\n")
    assert text[:50].startswith(whole[: len(text)])
    assert len(text) < 2000


@pytest.mark.parametrize("module", ["funcrt.cli.app", "funcrt.engine", "funcrt.text"])
def test_ctrl_c_while_modules_are_imported(module: str, folder: Path) -> None:
    script = f"""
import os, signal, sys
class Presser:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presser())
sys.argv = ["funcrt", "generate", {str(folder)!r}, "--prompt", "a"]
from funcrt.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")
