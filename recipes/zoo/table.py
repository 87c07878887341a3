"""The zoo's table in markdown, and the line of an entry."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
STAGES = ("fit", "turns", "loop", "service")
COLUMNS = (
    "entry", "where", "without µs", "with µs", "speed-up", "replayed", "equal to eager", "first replay", "floor µs",
    "why not replayed",
)  # fmt: skip


def speedup(stage: Row) -> float | None:
    """Return the time of a step without graphplan divided by the time with it; None if one is missing."""
    return stage["eager_us"] / stage["us"] if "us" in stage and "eager_us" in stage else None


def reason(stage: Row) -> str:
    """Return why steps were not replayed: the error, the first warning, or the most frequent reason in the report."""
    if "error" in stage:
        return str(stage["error"])
    if stage.get("share", 0) >= 0.99 and stage.get("form") == "whole":
        return ""
    said = [text.partition(": ")[2] for text in stage.get("warnings", ())] + stage.get("reasons", [])
    return str(said[0]) if said else ""


def first_replay(stage: Row) -> str:
    """Return the step of the first replay, and the time until then in steps without graphplan."""
    if "first_replay_step" not in stage:
        return ""
    return f"{stage['first_replay_step']}, {stage['first_replay_s'] / stage['eager_us'] * 1e6:.0f} eager"


def cells(row: Row) -> list[list[str]]:
    """Return the lines of one entry in the table."""
    if row.get("missing"):
        return [[row["name"], "", *[""] * 7, "not installed: pip install " + " ".join(row["missing"])]]
    lines = []
    for name in STAGES:
        stage = row.get(name)
        if stage is None:
            continue
        gain = speedup(stage)
        share = "" if "share" not in stage else f"{stage['share']:.0%}"
        form = stage.get("form", "whole")
        lines.append([
            row["name"], name, *(f"{stage[key]:.0f}" if key in stage else "" for key in ("eager_us", "us")),
            "" if gain is None else f"{gain:.2f}", share if form == "whole" else f"{share} ({form})",
            stage.get("equal", ""), first_replay(stage), floor_of(row), _short(reason(stage)),
        ])  # fmt: skip
    if "error" in row:
        lines.append([row["name"], "", *[""] * 7, _short(row["error"])])
    return lines


def floor_of(row: Row) -> str:
    """Return the time of the graph captured by hand, or "not captured" after an error."""
    floor = row.get("floor", {})
    return f"{floor['us']:.0f}" if "us" in floor else "not captured" if "error" in floor else ""


def _short(text: str, width: int = 220) -> str:
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def headline(rows: list[Row]) -> str:
    """Return counts of entries by outcome, one line for each stage."""
    lines = []
    for name in STAGES:
        stages = [row[name] for row in rows if name in row]
        if not stages:
            continue
        gains = [gain for gain in map(speedup, stages) if gain is not None]
        whole = sum(stage.get("share", 0) > 0.5 and stage.get("form") == "whole" for stage in stages)
        different = sum(stage.get("equal") == "different" for stage in stages)
        failed = sum("error" in stage for stage in stages)
        faster, slower = sum(gain > 1.05 for gain in gains), sum(gain < 0.95 for gain in gains)
        lines.append(
            f"- {name}: {len(stages)} entries, {whole} replayed as a whole, {faster} faster, {slower} slower, "
            f"{different} different from eager, {failed} failed"
        )
    missing, broken = (sum(key in row for row in rows) for key in ("missing", "error"))
    return "\n".join([*lines, f"- not installed: {missing}; not finished: {broken}"]) + "\n"


def markdown(rows: list[Row]) -> str:
    """Return the counts and the table in markdown."""
    lines = [cell for row in rows for cell in cells(row)]
    rule = ["---", "---", *["---:"] * 4, "---", "---", "---:", "---"]
    table = "\n".join("| " + " | ".join(line) + " |" for line in [list(COLUMNS), rule, *lines])
    return f"{headline(rows)}\n{table}\n"


def summary(row: Row) -> str:
    """Return one entry's line to print while the zoo runs."""
    said = []
    for line in cells(row):
        _, where, without, took, gain, share, equal, first, _, why = line
        said.append(f"{where} {without}->{took} ({gain}) replayed {share} {equal} first {first} {why[:110]}")
    return f"{row['name']:34s} " + f"\n{'':35s}".join(said)
