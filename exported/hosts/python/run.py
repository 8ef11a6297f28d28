#!/usr/bin/env python3
"""Runs a bundle with nothing but MLX: exported/README.md as code, to be read beside it.

    python run.py BUNDLE --prompt "Gravity is"      # text: needs tokenizers, and jinja2 for chats
    python run.py BUNDLE --prompt-ids 504,3575,282  # ids: needs mlx alone

Prompts may repeat and differ in length; they are one batch. One streams its answer, several are
answered at the end. MLX's Linux wheel multiplies with the reference BLAS, up to sixty times slower
than OpenBLAS (Debian: libopenblas0-pthread), which is taken instead where the system has it.
"""

import argparse
import ctypes
import json
import re
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

with suppress(OSError):  # there may be none
    ctypes.CDLL("libopenblas.so.0", ctypes.RTLD_GLOBAL)

import mlx.core as mx


def refuse(reason, unless=False):
    """End in one line, unless a condition holds."""
    if not unless:
        sys.exit(f"run.py: {' '.join(reason.split())}")


def full(spec, value, **sizes):
    """An array that holds one value."""
    shape = [sizes.get(size, size) for size in spec["shape"]]
    return mx.full(shape, value, dtype=getattr(mx, spec["dtype"]))


def choose(declared, wanted, what):
    """The smallest declared size that is large enough."""
    refuse(f"{what} {wanted} needed, largest is {declared[-1]}", unless=wanted <= declared[-1])
    return next(size for size in declared if size >= wanted)


class Bundle:
    """A bundle that was checked, with its weights prepared, and the cache state of a batch."""

    def __init__(self, folder, weights=(), digest=None):
        text = (folder / "manifest.json").read_bytes()
        digest = digest or (folder / "manifest.json.sha256").read_text().split()[0]
        refuse("manifest.json has another digest", unless=sha256(text).hexdigest() == digest)
        self.folder, self.manifest, self.calls = folder.resolve(), json.loads(text), {}
        form = f"{self.manifest['format']} {self.manifest['schema_version']}"
        refuse(f"cannot read {form}, only 3.x", unless=re.fullmatch(r"funcrt-bundle 3\.\d+", form))
        gpu = "metal" if mx.metal.is_available() else "cuda"
        device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else gpu
        targets = self.manifest["targets"]
        refuse(f"exported for {', '.join(targets)}, not {device}", unless=device in targets)
        self.target, mlx = targets[device], targets[device]["producer"]["mlx"]
        refuse(f"needs another MLX: pip install mlx=={mlx}", unless=mlx == mx.__version__)
        self.params = list(self.load_graph(self.find("prepare"))(*self.load_stored(weights)))
        mx.eval(self.params)

    def find(self, *names, **bucket):
        """The entry of the first of these functions that there is, or None."""
        entries = (e for name in names for e in self.target["functions"] if e["name"] == name)
        return next((e for e in entries if bucket.items() <= (e["bucket"] or {}).items()), None)

    def read(self, name):
        """The bytes of a listed file; MLX must not see damaged ones, which crash it."""
        path, listed = (self.folder / name).resolve(), self.manifest["files"].get(name)
        refuse(f"{name} is not in the bundle", unless=listed and path.is_relative_to(self.folder))
        data = path.read_bytes()
        refuse(f"{path} is damaged", unless=sha256(data).hexdigest() == listed["sha256"])
        return data

    def load_stored(self, files):
        """Weights in the order of `stored`; those of `files` go before those of the bundle."""
        names, found = self.manifest["params"]["files"], {}
        for file in [*(self.folder / name for name in names if self.read(name)), *files]:
            found |= mx.load(str(file), format="safetensors")
        for spec in self.manifest["params"]["stored"]:
            array = found.get(spec["name"], mx.array([]))
            refuse(f"weights lack {spec}: see --params", unless=list(array.shape) == spec["shape"])
            yield array.astype(getattr(mx, spec["dtype"]))

    def load_graph(self, entry):
        """MLX reads graphs from files only: it gets one of the very bytes that were checked."""
        with tempfile.NamedTemporaryFile(suffix=".mlxfn") as file:
            file.write(self.read(entry["file"]))
            file.flush()
            return mx.import_function(file.name)

    def call(self, entry, *inputs, **fill):
        """Outputs in order. Inputs that are not given hold `fill` of their name, or 0."""
        if entry["file"] not in self.calls:
            graph, params = self.load_graph(entry), self.params * (entry["params"] == "prepared")
            # Captured weights cost nothing per call; compiling fuses what a graph leaves apart.
            self.calls[entry["file"]] = mx.compile(lambda *arrays: graph(*params, *arrays))
        inputs += tuple(full(s, fill.get(s["name"], 0)) for s in entry["inputs"][len(inputs) :])
        outputs = self.calls[entry["file"]](*inputs, *self.state * entry["state"])
        if entry["state"]:  # let the old one go before the new one is computed in its place
            self.state = outputs[len(entry["outputs"]) :]
        mx.eval(outputs)
        return outputs[: len(entry["outputs"])]

    def generate(self, prompts, limit, ends, **settings):
        """Yield the answers to all prompts after every new token."""
        plan, longest, logits = self.target["plan"], max(map(len, prompts)), 0
        rows = choose(plan["batch"], len(prompts), "batch")
        slots = choose(plan["capacity"], longest + 1, "capacity")  # one is scratch
        find = partial(self.find, batch=rows)
        self.state = [full(spec, spec["fill"], B=rows, S=slots) for spec in self.target["cache"]]
        texts = [*prompts, *([] for _ in range(rows - len(prompts)))]
        for done in range(0, longest, plan["tokens"][-1]):
            size = next((t for t in plan["tokens"] if t >= longest - done), plan["tokens"][-1])
            chunks = [text[done : done + size] for text in texts]
            tokens = mx.array([chunk + [0] * (size - len(chunk)) for chunk in chunks])
            valid = mx.array([[i < len(chunk) for i in range(size)] for chunk in chunks])
            entry = find(*["prefill_first"][done:], "prefill", tokens=size, capacity=slots)
            logits = mx.where(valid[:, :1], self.call(entry, tokens, valid)[0], logits)
        lengths, live = mx.array([*map(len, texts)]), [*map(bool, texts)]
        tokens, _, finite, *_ = self.call(find("sample"), logits, lengths, **settings)
        for left in range(limit, 0, -1):
            refuse("logits are not finite", unless=mx.all(finite | ~mx.array(live)))
            texts = [text + [i] * on for text, i, on in zip(texts, tokens.tolist(), live)]
            yield [text[len(prompt) :] for text, prompt in zip(texts, prompts)]
            grow = find("grow", capacity=slots)
            if grow and max(map(len, texts)) >= slots:
                self.call(grow)
                slots = grow["grown"]
            live = [on and t[-1] not in ends and len(t) < slots for t, on in zip(texts, live)]
            if left == 1 or not any(live):
                return
            decode = find("decode" if settings["temperature"] else "decode_greedy", capacity=slots)
            tokens, _, finite, *_ = self.call(decode, tokens, mx.array(live), **settings)

    def encode(self, tokenizer, text, raw):
        """Ids of a prompt. A chat template, if there is one, writes special tokens such as BOS."""
        if raw or "chat_template.jinja" not in self.manifest["files"]:
            return tokenizer.encode(text).ids
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        jinja.add_extension("jinja2.ext.loopcontrols")
        jinja.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
        source = self.read("chat_template.jinja").decode()  # {% generation %} is for training
        source = re.sub(r"{%(.?) *(end)?generation *(.?)%}", r"{%\1 set _ = 0 \3%}", source)
        config = json.loads(self.read("tokenizer_config.json"))
        chat = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items()}
        chat |= {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        text = jinja.from_string(source).render(chat)
        return tokenizer.encode(text, add_special_tokens=False).ids


def main():
    """Read the command line, print the answers."""
    parser = argparse.ArgumentParser()
    parser.error = refuse
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--raw", action="store_true", help="without the chat template")
    parser.add_argument("--digest", help="that the manifest must have; export prints it")
    for name in ("--prompt", "--prompt-ids", "--params"):
        parser.add_argument(name, action="append", default=[])
    settings = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    for name, value in {"max_tokens": 256, **settings}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in settings} | {"repetition_penalty": 1}
    refuse("settings begin at 0", unless=all(0 <= n < 2**31 for n in settings.values()))
    bundle = Bundle(options.bundle, options.params, options.digest)
    if options.prompt:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_buffer(bundle.read("tokenizer.json"))
    prompts = [bundle.encode(tokenizer, text, options.raw) for text in options.prompt]
    prompts += [[*map(int, line.split(","))] for line in options.prompt_ids]
    known = all(0 <= min(ids) <= max(ids) < bundle.manifest["vocab_size"] for ids in prompts)
    refuse("give prompts, of ids that the model has", unless=prompts and known)
    ends = bundle.manifest["model"].get("eos_token_ids", ())
    if "generation_config.json" in bundle.manifest["files"]:
        ends = json.loads(bundle.read("generation_config.json"))["eos_token_id"]
    lines, shown = [], 0
    for answers in bundle.generate(prompts, options.max_tokens, ends, **settings):
        lines = [tokenizer.decode(a) if options.prompt else " ".join(map(str, a)) for a in answers]
        if len(lines) == 1 and not lines[0].endswith("\ufffd"):  # half a character
            print(lines[0][shown:], end="", flush=True)
            shown = len(lines[0])
    print(*[line[shown:] for line in lines], sep="\n")


if __name__ == "__main__":
    try:
        main()
    except Exception as problem:  # noqa: BLE001  whatever it is, one line says it
        refuse(f"{type(problem).__name__}: {problem}")
