"""``simlab report``: result files in, one self-contained HTML page out."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("results", nargs=-1, required=True, metavar="RESULT...")
@click.option("--out", required=True, metavar="FILE.html", help="The page to write.")
@click.option("--title", metavar="TEXT", help="Heading of the page; default: names the traces.")
def command(results: tuple[str, ...], out: str, title: str | None) -> None:
    """Draw results as one self-contained HTML page.

    RESULT are files that simlab replay --out wrote (.json or .parquet). The page works with the
    network off: a verdict computed from the rows, hit rate against MiB moved per token, both
    against slots with the cliff marked, the table of all cells, and where the figures come from.
    """
    from simlab.errors import UsageError
    from simlab.report.page import render_page
    from simlab.result.store import read_results
    from simlab.whole_file import write_atomically

    if Path(out).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{out}: a report is an HTML page; name it FILE.html")
    rows = [row for path in results for row in read_results(path)]
    page = render_page(rows, title)
    write_atomically(out, page.encode("utf-8", errors="replace"))
    click.echo(out)
