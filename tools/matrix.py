"""The release matrix: every patch's affected and unaffected configurations on any releases, stock and corrected.

    python tools/matrix.py [RELEASE ...]      every release that runs here, if none is given; then writes the page
    python tools/matrix.py --only TEXT ...    only the configurations with this text in their names, anew
    python tools/matrix.py --page             writes the page only

Each release runs in processes of its own, over gloo. What is measured goes into docs/matrix.json as it comes, and a
release that is there is not run again, so that a run can be taken up where it stopped; --anew RELEASE measures one once
more. docs/matrix.md is written from the file. The configurations are those of tests/ranks/core_set.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import releases
from packaging.version import Version

from ds_gradfix.registry import Plan, catalogue, discover, make_plan
from ds_gradfix.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "matrix.json", ROOT / "docs" / "matrix.md"
OLDEST_THAT_RUNS = Version("0.14.4")
"""Before it DeepSpeed imports a name that the torch pinned here no longer has."""
LAUNCHES = {"main": 2, "four": 4, "unaided": 2, "transformers": 2}
"""The parts of the core set, and the ranks that each takes."""
FOLDING = Version("0.19.3")
"""The first release that the part with Transformers can run on."""
PATIENCE = 300.0
"""Seconds for one launch."""
BROKEN = ("closed by peer", "Timed out", "timeout")
"""Of errors that can come from an earlier configuration that lost a rank: such a one is run again alone."""

sys.path.insert(0, str(ROOT / "tests"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration on one release.

    A ratio is what was measured over what is right, the one furthest from 1 of gradients, norms and updates on all
    ranks, to four digits; None where the run ended with an error, whose last line is then in ``said``. ``run`` names
    the targets of the configuration's patches that stock ran.
    """

    name: str
    stock: float | None
    corrected: float | None
    stock_right: bool
    corrected_right: bool
    same_bits: bool
    said: tuple[str, str] = ("", "")
    run: tuple[str, ...] = ()

    @property
    def affected(self) -> bool:
        return bool(self.patches) and " beside" not in self.name.split(":")[0]

    @property
    def patches(self) -> list[str]:
        named = self.name.split(": ", 1)[0]
        return [one for one in named.removesuffix("beside").strip().split(" + ") if one]

    @property
    def configuration(self) -> str:
        return self.name.split(": ", 1)[1]

    @property
    def ran(self) -> bool:
        """Not where stock and corrected end alike: then it is not a configuration of this release."""
        return not (self.said[0] and self.said[0] == self.said[1])


# --------------------------------------------------------------------------------------- running


def run(release: str, parts: Iterable[str] = LAUNCHES, texts: Sequence[str] = ()) -> list[Row]:
    """The core set on one release, or what of it has one of these texts in its name.

    Raises AssertionError where a rank dies.
    """
    from launching import played

    rows = []
    for part in parts:
        if part == "transformers" and not (_transformers() and Version(release) >= FOLDING):
            continue
        launch = partial(played, "core_set.py", part, ranks=LAUNCHES[part], release=release, timeout=PATIENCE)
        outcomes = launch(*texts)
        for name, by_mode in outcomes.items():
            if any(sign in _error(ranks) for ranks in by_mode.values() for sign in BROKEN):
                by_mode = launch(name)[name]
            rows.append(row(name, by_mode["stock"], by_mode["corrected"]))
    return rows


def _transformers() -> bool:
    try:
        return Version(importlib.metadata.version("transformers")) >= Version("5.0")
    except importlib.metadata.PackageNotFoundError:
        return False


def row(name: str, stock: Sequence[dict[str, Any]], corrected: Sequence[dict[str, Any]]) -> Row:
    """Out of what every rank gave."""
    found = Row(name, None, None, False, False, False)
    own = {str(target) for patch in discover(plugins=False) if patch.id in found.patches for target in patch.targets}
    return dataclasses.replace(
        found,
        stock=_ratio(stock),
        corrected=_ratio(corrected),
        stock_right=all(rank.get("right") for rank in stock),
        corrected_right=all(rank.get("right") for rank in corrected),
        same_bits=[rank.get("digest") for rank in stock] == [rank.get("digest") for rank in corrected],
        said=(_error(stock), _error(corrected)),
        run=tuple(sorted({target for rank in stock for target in rank.get("run", ())} & own)),
    )


def _ratio(ranks: Sequence[dict[str, Any]]) -> float | None:
    found = [rank["ratio"] for rank in ranks if "ratio" in rank]
    if len(found) < len(ranks):
        return None
    return float(f"{max(found, key=lambda one: abs(one - 1) if one == one else float('inf')):.4g}")


def _error(ranks: Sequence[dict[str, Any]]) -> str:
    traces = [rank["error"] for rank in ranks if isinstance(rank.get("error"), str)]
    return traces[0].strip().splitlines()[-1][:100] if traces else ""


# --------------------------------------------------------------------------------------- keeping


def read() -> dict[str, Any]:
    """``{"releases": {release: date}, "outcomes": {configuration: [{..., "releases": [...]}]}}``"""
    if RESULTS.exists():
        return dict(json.loads(RESULTS.read_text(encoding="utf-8")))
    return {"releases": {}, "outcomes": {}}


def write(results: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def add(results: dict[str, Any], release: str, rows: Iterable[Row]) -> None:
    """In place of what a release gave before in these configurations. Releases with the same outcome share an entry."""
    results["releases"][release] = date.today().isoformat()
    results["releases"] = dict(sorted(results["releases"].items(), key=lambda item: Version(item[0])))
    for one in rows:
        found = json.loads(json.dumps({key: v for key, v in dataclasses.asdict(one).items() if key != "name"}))
        outcomes = _without(results["outcomes"].get(one.name, []), release)
        results["outcomes"][one.name] = outcomes
        for outcome in outcomes:
            if all(_same(outcome[key], value) for key, value in found.items()):
                outcome["releases"] = sorted([*outcome["releases"], release], key=Version)
                break
        else:
            outcomes.append({**found, "releases": [release]})


def _without(outcomes: list[dict[str, Any]], release: str) -> list[dict[str, Any]]:
    left = [{**one, "releases": [own for own in one["releases"] if own != release]} for one in outcomes]
    return [one for one in left if one["releases"]]


def _same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))  # a ratio that is not a number equals its like


def rows_of(results: dict[str, Any], release: str) -> list[Row]:
    found = []
    for name, outcomes in results["outcomes"].items():
        for outcome in outcomes:
            if release in outcome["releases"]:
                data = {key: tuple(v) if isinstance(v, list) else v for key, v in outcome.items() if key != "releases"}
                found.append(Row(name=name, **data))
    return found


# --------------------------------------------------------------------------------------- judging


MAIN_TARGETS = (
    "DeepSpeedEngine.allreduce_bucket",
    "DeepSpeedEngine.backward",
    "DeepSpeedZeroOptimizer.average_tensor",
    "DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue",
    "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads",
)
"""What every gradient passes: without ZeRO, on its way back, under ZeRO-1 and 2, and under ZeRO-3."""


def representatives() -> list[str]:
    """The oldest release that runs, the newest, and a few more, so that every source of a main target has one."""
    entries = [entry for entry in catalogue() if entry["target"].split(":")[1] in MAIN_TARGETS]
    sources = [{one for one in entry["releases"] if Version(one) >= OLDEST_THAT_RUNS} for entry in entries]
    every = set().union(*sources)
    chosen = {min(every, key=Version), max(every, key=Version)}
    while left := [source for source in sources if source and not source & chosen]:
        chosen.add(max(every, key=lambda one: (sum(one in source for source in left), Version(one))))
    return sorted(chosen, key=Version)


@cache
def plan_of(release: str) -> Plan:
    return make_plan(releases.as_installed(release), discover(plugins=False), Settings())


def corrects(release: str) -> set[str]:
    """The patches that act on a release, because the catalogue calls its sources defective."""
    return {entry.patch.id for entry in plan_of(release).entries if entry.act}


def contradictions(release: str, rows: Sequence[Row]) -> Iterator[str]:
    """Where what was measured is not what the catalogue and the promise say."""
    acting = corrects(release)
    for one in rows:
        if not one.ran:
            continue
        where = f"{release}, {one.name}"
        if not one.corrected_right:
            yield f"{where}: corrected gives {one.said[1] or one.corrected}"
        expected = one.affected and acting.intersection(one.patches)
        if not one.stock_right and not expected:
            yield f"{where}: stock gives {one.said[0] or one.stock}, and no patch corrects that"
        if one.stock_right and not expected and not one.same_bits:
            yield f"{where}: is right, and not left as it is to the bit"
    for patch in sorted(acting):
        own = [one for one in rows if one.affected and patch in one.patches and one.ran]
        if own and all(one.stock_right for one in own):
            yield f"{release}: {patch} corrects nothing here: stock is right in every configuration"


# --------------------------------------------------------------------------------------- the page


HEADING = ("| patch | DeepSpeed | configuration | stock | corrected |", "|---|---|---|---|---|")


def page(results: dict[str, Any]) -> str:
    known = list(results["releases"])
    every = {release: rows_of(results, release) for release in known}
    ran = [(release, one) for release, rows in every.items() for one in rows if one.ran]
    wrong = [pair for pair in ran if not pair[1].stock_right]
    still = [pair for pair in ran if not pair[1].corrected_right]
    same = [pair for pair in ran if pair[1].same_bits]
    against = [text for release, rows in every.items() for text in contradictions(release, rows)]
    skipped = sorted({(one.name, one.said[0]) for rows in every.values() for one in rows if not one.ran})
    dates = sorted(set(results["releases"].values()))
    lines = [
        "# The release matrix",
        "",
        f"Measured on {' and '.join(dates)} by `python tools/matrix.py`: {len(known)} releases of DeepSpeed, "
        f"{known[0]} to {known[-1]}, {len(results['outcomes'])} configurations, each on real ranks over gloo, on stock "
        "and corrected, against float64 in one process. A ratio is what was measured over what is right, the one "
        "furthest from 1 of all gradients, norms and updates.",
        "",
        f"- {len(ran)} pairs of release and configuration ran. Stock is wrong in {len(wrong)}, corrected in "
        f"{len(still)}; in {len(same)} both are the same to the bit.",
        f"- The catalogue and what was measured disagree {len(against)} times.",
        *(f"  - {text}" for text in against),
        "",
        "Releases before 0.14.4 do not import under the torch that is pinned here; they are covered by reading alone.",
        "",
        *HEADING,
    ]
    for patch in discover(plugins=False):
        for name in results["outcomes"]:
            first = next((one for rows in every.values() for one in rows if one.name == name), None)
            if first is None or not first.affected or first.patches[0] != patch.id:
                continue
            lines += lines_of(name, every)
    lines += ["", "Configurations beside them, in which stock is right, or another patch's defect bites:", ""]
    lines += ["| beside | DeepSpeed | configuration | stock | corrected |", "|---|---|---|---|---|"]
    for name in results["outcomes"]:
        if " beside:" in f" {name.split(': ')[0]}:":
            lines += lines_of(name, every)
    lines += ["", "What a release does not have, or refuses with and without ds-gradfix:", ""]
    lines += [f"- {name}: `{said}`" for name, said in skipped]
    return "\n".join(lines) + "\n"


def lines_of(name: str, every: dict[str, list[Row]]) -> list[str]:
    """One for each run of releases in a row with the same outcome."""
    found: list[tuple[list[str], Row]] = []
    for release, rows in every.items():
        one = next((row for row in rows if row.name == name and row.ran), None)
        if one is None:
            continue
        if found and _shown(found[-1][1]) == _shown(one):
            found[-1][0].append(release)
        else:
            found.append(([release], one))
    lines = []
    for own, one in found:
        span = own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"
        patches = " ".join(f"`{patch}`" for patch in one.patches)
        lines.append(f"| {patches} | {span} | {one.configuration} | {' | '.join(_shown(one))} |")
    return lines


def _shown(one: Row) -> tuple[str, str]:
    if one.stock_right and one.same_bits:
        return "right", "the same bits"
    return (
        "right" if one.stock_right else f"`{one.said[0]}`" if one.said[0] else f"{one.stock}",
        "right" if one.corrected_right else f"`{one.said[1]}`" if one.said[1] else f"**{one.corrected}**",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--anew", action="store_true", help="measure the releases named here anew")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=1, help="releases at a time")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("releases", nargs="*")
    given = parser.parse_args()
    if given.rows:  # one release, in a process that takes its ranks' processes with it
        print(json.dumps([dataclasses.asdict(one) for one in run(given.releases[0], texts=given.only)]))
        return
    wanted = given.releases or [one for one in releases.published() if Version(one) >= OLDEST_THAT_RUNS]
    results = read()
    missing = [one for one in wanted if given.anew or given.only or one not in results["releases"]]
    with ThreadPoolExecutor(given.jobs) as jobs:  # ranks wait for each other: two releases fill two cores
        for release, rows in zip(missing, jobs.map(partial(_apart, given.only), [] if given.page else missing)):
            if isinstance(rows, str):
                print(f"{release}: could not be measured\n{rows}", flush=True)
                continue
            add(results, release, rows)
            write(results)
            ran = [one for one in rows if one.ran]
            said = f"{release}: {len(ran)} configurations, wrong on stock {sum(not one.stock_right for one in ran)}"
            print(f"{said}, corrected {sum(not one.corrected_right for one in ran)}", flush=True)
            for text in contradictions(release, rows):
                print(f"  {text}", flush=True)
    PAGE.write_text(page(read()), encoding="utf-8")


def _apart(texts: Sequence[str], release: str) -> list[Row] | str:
    """One release in a process that takes its ranks' processes with it; what went wrong, where nothing came of it."""
    command = [sys.executable, __file__, "--rows", release, *(f"--only={text}" for text in texts)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-2000:]
    return [row_from(data) for data in json.loads(done.stdout.splitlines()[-1])]


def row_from(data: dict[str, Any]) -> Row:
    return Row(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


if __name__ == "__main__":
    main()
