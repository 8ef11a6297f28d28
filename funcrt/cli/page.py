"""`funcrt inspect --html`: a bundle on one page that needs nothing but a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from funcrt.cli import descriptions as d
from funcrt.cli import terminal
from funcrt.cli.charts import (
    Chart,
    Panel,
    Point,
    Stack,
    draw_panels,
    draw_points,
    draw_stacks,
)

if TYPE_CHECKING:
    from funcrt.bundle.facts import BundleFacts, FunctionFacts, TargetFacts
    from funcrt.bundle.format.manifest import StateArray
    from funcrt.bundle.proof.certificate import Certificate, Check

_TEMPLATE = "page.html"


class Table(NamedTuple):
    """A table: `kind` of each column is "text" or "number"; `folded` hides it until it is opened.

    The first cell of a row is its heading. Rows of `bad` stand out.
    """

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    bad: frozenset[int] = frozenset()


class Section(NamedTuple):
    """A part of the page; facts are pairs of a name and a text."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def render(facts: BundleFacts, certificate: Certificate | None) -> str:
    """The page as HTML. It loads nothing, runs no scripts, and follows the reader's colours."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    source = resources.files("funcrt.cli").joinpath(_TEMPLATE).read_text("utf-8")
    (_, summary), *rest = d.header(facts, certificate)
    return environment.from_string(source).render(
        title=facts.folder.absolute().name,
        summary=summary,
        facts=[*rest, *(("damaged", damage) for damage in facts.damage)],
        tiles=list(_tiles(facts, certificate)),
        sections=[*map(_target, facts.targets), _certificate(facts, certificate), _files(facts)],
    )


def _tiles(facts: BundleFacts, certificate: Certificate | None) -> Iterator[tuple[str, str, str]]:
    """The numbers to begin with: what it is, the number, and a class."""
    functions = [f for target in facts.targets for f in target.functions]
    peaks = [m.weights + m.state + m.call for target in facts.targets for m in target.memory]
    yield "weights, as stored", terminal.size(facts.stored), ""
    yield "functions", str(len(functions)), ""
    yield "their graphs", terminal.size(sum(f.file_bytes for f in functions)), ""
    yield "largest peak memory", terminal.size(max(peaks)) if peaks else "not known", ""
    if certificate is None:
        yield "certificate", "none", ""
    else:
        passed = certificate.passed
        yield "certificate", "passed" if passed else "FAILED", "good" if passed else "bad"


# --- a device class ------------------------------------------------------------------------------


def _target(facts: TargetFacts) -> Section:
    (_, what), *rest = d.target_header(facts)
    charts = [_chart_of_calls(facts)]
    if facts.memory:
        charts.append(_chart_of_memory(facts))
    tables = [_functions(facts), _arrays(facts), _memory(facts), _cache(facts.target.cache)]
    return Section(
        f"Functions for {facts.device}", [("computes in", what), *rest], charts,
        [table for table in tables if table.rows],
    )  # fmt: skip


def _chart_of_calls(facts: TargetFacts) -> Chart:
    functions = facts.functions
    size = terminal.size
    chart = Chart(
        "What a call of each function takes",
        "One row for each function: nodes of its graph, the most bytes of weights, state and "
        "inputs that a call reads, and bytes of the graph's file. The same numbers are in the "
        "table below.",
    )
    panels = [
        Panel("primitives", [f.entry.primitives for f in functions], lambda n: f"{n:.0f}"),
        Panel("bytes read, at most", [f.reads for f in functions], size),
        Panel("graph file", [f.file_bytes for f in functions], size),
    ]
    return draw_panels(
        chart, [_label(f) for f in functions], [f.entry.name for f in functions], panels
    )


def _chart_of_memory(facts: TargetFacts) -> Chart:
    stacks = [
        Stack(
            f"batch {m.batch}, {m.capacity} slots", (m.weights, m.state, m.call),
            f"The largest call is {m.largest}.",
        )
        for m in facts.memory
    ]  # fmt: skip
    chart = Chart(
        "Memory by batch and capacity",
        "One row for each: prepared weights, the cache state, and the most that a call takes "
        "besides, as estimated. The same numbers are in a table below.",
    )
    return draw_stacks(chart, ("weights", "cache state", "largest call"), stacks, terminal.size)


def _label(facts: FunctionFacts) -> str:
    bucket = facts.entry.bucket
    return facts.entry.name + (f" {bucket}".replace("_", " ") if bucket else "")


def _functions(facts: TargetFacts) -> Table:
    numbers = ("primitives", "reads at most", "cache state", "expected peak", "graph file")
    columns = [("function", "text"), *((name, "number") for name in numbers)]
    return Table("What a call takes", columns, [
        (f.entry.key, str(f.entry.primitives), terminal.size(f.reads), d.cache_size(f),
         d.peak_size(f), terminal.size(f.file_bytes))
        for f in facts.functions
    ])  # fmt: skip


def _arrays(facts: TargetFacts) -> Table:
    columns = [(name, "text") for name in ("function", "takes", "returns")]
    return Table("What functions take and return", columns, [
        (f.entry.key, d.takes([f]), d.returns([f])) for f in facts.functions
    ], folded=True)  # fmt: skip


def _memory(facts: TargetFacts) -> Table:
    numbers = ("capacity", "weights", "cache state", "largest call", "together")
    columns = [("batch", "text"), *((n, "number") for n in numbers), ("its function", "text")]
    return Table("Memory by batch and capacity", columns, [
        (str(m.batch), str(m.capacity),
         *map(terminal.size, (m.weights, m.state, m.call, m.weights + m.state + m.call)), m.largest)
        for m in facts.memory
    ], folded=True)  # fmt: skip


def _cache(arrays: Sequence[StateArray]) -> Table:
    columns = [(name, "text") for name in ("array", "kind", "shape", "dtype", "when empty")]
    return Table(f"The cache state: {len(arrays)} arrays", columns, [
        (a.name, a.kind, f"[{', '.join(map(str, a.shape))}]", a.dtype, str(a.fill)) for a in arrays
    ], folded=True)  # fmt: skip


# --- the whole bundle ----------------------------------------------------------------------------


def _certificate(facts: BundleFacts, certificate: Certificate | None) -> Section:
    line = d.certificate_line(certificate)
    if certificate is None:
        return Section("Certificate", [("verified", line)])
    keys = [f.entry.key for f in facts.find(certificate.target).functions]
    places = {key: place for place, key in enumerate(keys)}
    checks = sorted(certificate.checks, key=lambda c: (c.passed, places.get(c.function, -1)))
    measured = [check for check in checks if check.allowed > 0]
    exact = [check for check in checks if check.allowed == 0]
    said = [("verified", line), ("made", f"{certificate.date} by funcrt {certificate.funcrt}")]
    if exact:
        wrong = sum(not check.passed for check in exact)
        passed = f"{wrong} of {len(exact)} are not" if wrong else f"all {len(exact)} are"
        said.append(("counts that must be 0", f"{passed} (rows or tokens that differ)"))
    charts = [_chart_of_checks(measured)] if measured else []
    return Section("Certificate", said, charts, [_checks(checks)])


def _chart_of_checks(checks: Sequence[Check]) -> Chart:
    failed = [check.function for check in checks if not check.passed]
    chart = Chart(
        "Measured against allowed",
        f"One row for each check whose limit is above 0, {len(checks)} in all, over powers of ten. "
        + (f"These failed: {', '.join(failed)}. " if failed else "All passed. ")
        + "The same numbers are in the table below.",
    )
    points = [
        Point(c.function if c.check == "error" else f"{c.function} {c.check}",
              c.function.rsplit("_b", 1)[0], c.measured, c.allowed, c.passed)
        for c in checks
    ]  # fmt: skip
    return draw_points(chart, points)


def _checks(checks: Sequence[Check]) -> Table:
    columns = [("function", "text"), ("check", "text"), ("measured", "number"),
               ("allowed", "number"), ("", "text")]  # fmt: skip
    return Table(f"All {len(checks)} checks", columns, [
        (c.function, c.check, _number(c.measured), _number(c.allowed),
         f"{'passed' if c.passed else 'failed'}{', ' if c.note else ''}{c.note}")
        for c in checks
    ], folded=True, bad=frozenset(i for i, c in enumerate(checks) if not c.passed))  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _files(facts: BundleFacts) -> Section:
    files = facts.manifest.files
    columns = [("file", "text"), ("bytes", "number"), ("sha256", "text")]
    rows = [(name, str(entry.size), entry.sha256) for name, entry in files.items()]
    return Section(
        "Files",
        [("together", f"{len(files)} files, {terminal.size(facts.total)}")],
        tables=[Table("All files", columns, rows, folded=True)],
    )
