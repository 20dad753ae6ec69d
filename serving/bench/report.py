"""One HTML page of a comparison: a table and, for each load, a plot as PNG inside it and beside it."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_COLUMNS = ("server", "load", "streams", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "tok_s")
_STYLE = "body{font:15px system-ui;margin:2rem;max-width:70rem}td,th{padding:.2rem .7rem;text-align:right}"


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write `path` and one PNG per load next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = []
    for load in sorted({row["load"] for row in rows}):
        picture = plot(load, [row for row in rows if row["load"] == load])
        path.with_name(f"{path.stem}-{load}.png").write_bytes(picture)
        data = base64.b64encode(picture).decode()
        images.append(f'<h2>{html.escape(load)}</h2><img alt="{html.escape(load)}" src="data:image/png;base64,{data}">')
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>pdserve bench compare</title><style>{_STYLE}</style>"
        f"<h1>pdserve bench compare</h1>{_html_table(rows)}{''.join(images)}\n",
        encoding="utf-8",
    )


def plot(load: str, rows: Sequence[Row]) -> bytes:
    """A PNG: time to first token across, the 99th percentile between tokens up, a point per server and streams."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for server in dict.fromkeys(row["server"] for row in rows):
        points = [row for row in rows if row["server"] == server]
        axes.plot(
            [row["ttft_p50_s"] for row in points],
            [row["itl_p99_s"] for row in points],
            marker="o",
            linestyle="none" if load == "long-prompts" else "-",
            label=server,
        )
        for row in points:
            axes.annotate(
                str(row["streams"]), (row["ttft_p50_s"], row["itl_p99_s"]), xytext=(4, 4), textcoords="offset points"
            )
    axes.set_xlabel("time to first token, p50, s")
    axes.set_ylabel("between tokens, p99, s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"{load}: numbers are streams; lower left is better")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return buffer.getvalue()


def _html_table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row[column])}</td>" for column in _COLUMNS) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
