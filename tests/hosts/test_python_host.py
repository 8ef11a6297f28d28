"""The standalone Python host: alone with mlx it says token for token what this package says."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import funcrt
from funcrt.buckets import BucketPlan
from funcrt.bundle import Bundle, export, load_bundle
from funcrt.sampling import make_settings
from funcrt.storage import save_arrays
from tests.helpers import assert_same, ids, make_model, make_params, random_tokens
from tests.hosts.conftest import make_bundle
from tests.hosts.python_host import HOST, Command, listed, sign

import mlx.core as mx
import pytest
import tokenizers

LONG, SHORT = random_tokens(11), random_tokens(3)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "affine"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("host") / "tiny.funcrt", request.param)


@pytest.fixture(scope="module")
def host() -> SimpleNamespace:
    """What the file defines."""
    return SimpleNamespace(**runpy.run_path(str(HOST)))


def generate(bundle: Bundle, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """New ids of a batch, by this package's own engine."""
    with funcrt.Engine(bundle) as engine:
        return [done.tokens for done in engine.generate(prompts, **options)]


def test_it_stays_short_and_stands_alone() -> None:
    text = HOST.read_text("utf-8")
    assert len(text.splitlines()) < 200
    assert "import funcrt" not in text
    assert "from funcrt" not in text


# --- the same numbers ----------------------------------------------------------------------------


def test_logits_and_states_are_bitwise_the_same(folder: Path, host: SimpleNamespace) -> None:
    ours, theirs = load_bundle(folder), host.Bundle(folder)
    tokens = ids(LONG[:8], [*SHORT, 0, 0, 0, 0, 0])
    valid = mx.array([[True] * 8, [True] * 3 + [False] * 5])
    prefilled, state = ours.functions.prefill(tokens, valid, ours.init_cache(2, 16))
    specs = theirs.target["cache"]
    theirs.state = [host.full(spec, spec["fill"], B=2, S=16) for spec in specs]
    (logits,) = theirs.call(theirs.find("prefill", batch=2, tokens=8, capacity=16), tokens, valid)
    assert_same({"logits": logits}, {"logits": prefilled})

    token, active = mx.argmax(prefilled, axis=-1).astype(mx.int32), mx.array([True, False])
    settings = make_settings(2, ours.vocab_size, temperature=0.7, top_k=5, seed=3)
    drawn, state = ours.functions.decode(token, active, settings, state)
    entry = theirs.find("decode", batch=2, capacity=16)
    fill = {"temperature": 0.7, "top_k": 5, "top_p": 1.0, "seed": 3, "repetition_penalty": 1}
    results = theirs.call(entry, token, active, **fill)
    outputs = [spec["name"] for spec in entry["outputs"]]
    expected = {name: getattr(drawn, name) for name in outputs if name != "history"}
    assert_same(dict(zip(outputs[:-1], results[:-1], strict=True)), expected)
    names = [spec["name"] for spec in specs]
    assert_same(dict(zip(names, theirs.state, strict=True)), state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "seed": 1},
    ],
    ids=["greedy", "drawn", "filtered"],
)
def test_a_ragged_batch_says_what_the_engine_says(
    folder: Path, run: Command, options: dict[str, float]
) -> None:
    """From the smaller capacity into the larger one, until the longer row fills it."""
    expected = generate(load_bundle(folder), [LONG, SHORT], max_tokens=25, **options)
    assert len(expected[0]) == 32 - len(LONG)  # 31 slots hold all but the last one
    flags = [str(word) for k, v in options.items() for word in (f"--{k.replace('_', '-')}", v)]
    prompts = ["--prompt-ids", listed(LONG), "--prompt-ids", listed(SHORT)]
    lines = run(folder, *prompts, "--max-tokens", "25", *flags).splitlines()
    assert [[int(number) for number in line.split()] for line in lines] == expected


def test_the_first_chunk_looks_at_no_slots(
    long_calls: Path, without_prefill: Path, run: Command
) -> None:
    long, short = random_tokens(35, 1), random_tokens(3, 2)  # the longer one in two chunks
    expected = generate(load_bundle(long_calls), [long, short], max_tokens=5)
    prompts = ["--prompt-ids", listed(long), "--prompt-ids", listed(short)]
    lines = run(without_prefill, *prompts, "--max-tokens", "5").splitlines()
    assert [[int(number) for number in line.split()] for line in lines] == expected


def test_a_row_ends_at_an_end_token(plain: Path, copy: Path, run: Command) -> None:
    whole = run(plain, "--prompt-ids", listed(LONG), "--max-tokens", "12").split()
    manifest = copy / "generation_config.json"
    manifest.write_text(json.dumps({"eos_token_id": [int(whole[4])]}))
    sign(copy)
    both = ["--prompt-ids", listed(LONG), "--prompt-ids", listed(SHORT)]
    ended, other = run(copy, *both, "--max-tokens", "12").splitlines()
    assert ended.split() == whole[: whole.index(whole[4]) + 1]
    assert other == run(plain, *both, "--max-tokens", "12").splitlines()[1]


# --- a process with nothing else -----------------------------------------------------------------

ALONE = """
import runpy, sys
for name in ("funcrt", "converters", "numpy", "tokenizers", "jinja2"):
    sys.modules[name] = None  # importing it fails
host, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(host, run_name="__main__")
"""


def test_ids_need_nothing_but_mlx(plain: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(HOST), str(plain)]
    command += ["--prompt-ids", listed(LONG), "--max-tokens", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [int(n) for n in done.stdout.split()] == generate(
        load_bundle(plain), [LONG], max_tokens=4
    )[0]


def test_an_error_is_one_line_and_exit_code_1(plain: Path) -> None:
    command = [sys.executable, str(HOST), str(plain), "--prompt-ids", "1,x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("run.py: ")
    assert done.stderr.count("\n") == 1


# --- text ----------------------------------------------------------------------------------------


def test_text_goes_through_the_chat_template_unless_raw(copy: Path, run: Command) -> None:
    (copy / "chat_template.jinja").write_text(
        "{%- for m in messages %}{% generation %}\n{{ m.content }} {{ eos_token }}"
        "{%- endgeneration %}{% break %}{% endfor %}{{ add_generation_prompt and ' w9' }}"
    )
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing("w2 $A", None, [("w2", 2)])
    backend.save(str(copy / "tokenizer.json"))
    sign(copy)
    bundle = load_bundle(copy)
    assert bundle.tokenizer is not None
    chat = bundle.tokenizer.apply_chat_template([{"role": "user", "content": "w3 w4"}])
    assert chat == [3, 4, 1, 9]
    for flags, prompt in [((), chat), (("--raw",), [2, 3, 4])]:
        expected = bundle.tokenizer.decode(generate(bundle, [prompt], max_tokens=6)[0])
        said = run(copy, "--prompt", "w3 w4", "--max-tokens", "6", *flags)
        assert said.split() == [word for word in expected.split() if word != "w1"]


def test_a_template_may_refuse(copy: Path, run: Command) -> None:
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no\nsystem role') }}")
    sign(copy)
    with pytest.raises(SystemExit, match=r"^run.py: no system role$"):
        run(copy, "--prompt", "w3")


def test_text_streams_in_whole_characters(
    copy: Path, monkeypatch: pytest.MonkeyPatch, run: Command
) -> None:
    """Two tokens make an é; a token that ends in half of one is held back to the end."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "Ã": 1, "©": 2, "b": 3}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(copy / "tokenizer.json"))
    sign(copy)
    answer, pieces = [0, 1, 2, 3, 1], list[str]()

    class Answers:
        """Text of a known answer instead of a model's."""

        def __init__(self, *_: Any) -> None:
            self.manifest = {"files": {}, "vocab_size": 4, "model": {}}

        def read(self, name: str) -> bytes:
            return (copy / name).read_bytes()

        def encode(self, *_: Any) -> list[int]:
            return [0]

        def generate(self, *_: Any, **__: Any) -> Iterator[list[list[int]]]:
            yield from ([answer[:count]] for count in range(1, 6))

    main = runpy.run_path(str(HOST))["main"]
    monkeypatch.setitem(main.__globals__, "Bundle", Answers)
    monkeypatch.setattr(sys, "argv", ["run.py", str(copy), "--prompt", "a"])
    monkeypatch.setattr(sys.stdout, "write", lambda piece: pieces.append(piece))
    main()
    assert [piece for piece in pieces if piece] == ["a", "é", "b", "\ufffd", "\n"]


# --- other weights -------------------------------------------------------------------------------


def test_other_weights_take_the_place_of_the_bundles(
    plain: Path, run: Command, tmp_path: Path
) -> None:
    params = make_params(make_model().config, seed=1)
    file = tmp_path / "tuned.safetensors"
    some = {name: params[name] for name in list(params)[:5]}
    save_arrays(file, some)
    expected = generate(load_bundle(plain, params=some), [LONG], max_tokens=8)[0]
    said = run(plain, "--prompt-ids", listed(LONG), "--max-tokens", "8", "--params", file)
    assert [int(number) for number in said.split()] == expected
    assert expected != generate(load_bundle(plain), [LONG], max_tokens=8)[0]


def test_a_bundle_without_weights_needs_some(run: Command, tmp_path: Path) -> None:
    model = make_model("bfloat16")
    export(
        model, tmp_path / "bare.funcrt", BucketPlan(batch=2, tokens=8, capacity=16), weights=False
    )
    save_arrays(
        tmp_path / "a.safetensors", {k: v.astype(mx.float32) for k, v in model.params.items()}
    )
    prompt = ["--prompt-ids", listed(SHORT), "--max-tokens", "5"]
    with pytest.raises(SystemExit, match=r"run.py: weights lack .*'model.*see --params"):
        run(tmp_path / "bare.funcrt", *prompt)
    said = run(tmp_path / "bare.funcrt", *prompt, "--params", tmp_path / "a.safetensors")
    bundle = load_bundle(tmp_path / "bare.funcrt", params=model.params)
    assert [int(number) for number in said.split()] == generate(bundle, [SHORT], max_tokens=5)[0]
