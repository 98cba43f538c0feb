"""``penstock table``: maintenance of the Delta and Iceberg tables that sinks and exports write."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands.shared import Run, argument, command, option
from penstock.cli.units import counted

group = typer.Typer(help="Maintain Delta and Iceberg tables.", no_args_is_help=True)


@command(
    group,
    "compact",
    "penstock table compact orders --url delta:///data/lake",
    "penstock table compact iceberg:prod.shop.orders --file-size 256",
)
def compact(
    run: Run,
    name: Annotated[
        str,
        argument(
            "TABLE", "The table's name in the folder or catalog of --url, or iceberg:CATALOG.NAMESPACE.TABLE."
        ),
    ],
    file_size: Annotated[
        int, option("--file-size", "MIB", "The target size of the new files, in MiB.", min=1, max=10_240)
    ] = 128,
) -> None:
    """Compact the small files of a Delta or Iceberg table.

    --url is delta:///folder, delta:s3://bucket/folder or iceberg:CATALOG. The rows stay the same, and queries
    can keep writing. The replaced files stay for readers of earlier versions, until a VACUUM or until the
    snapshots expire.
    """
    from penstock.lake.storage import is_delta
    from penstock.tables.compaction import compact_table
    from penstock.tables.iceberg.location import is_iceberg

    # The default is a store, which has no such tables.
    url = run.url if is_delta(run.url) or is_iceberg(run.url) else None
    done = compact_table(name, url, file_bytes=file_size << 20)
    text = f"merged {counted(done.merged_files, 'file')} of table {name!r} into {done.new_files}"
    data = {"table": name, "merged_files": done.merged_files, "new_files": done.new_files}
    run.output.done(text if done.merged_files else f"table {name!r} has no files to merge", data)
