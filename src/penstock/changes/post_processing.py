"""``changes.post_process``: the passes over change rows as operations on a DataFrame."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructField, StructType

from penstock.arguments import require
from penstock.arrow.schema import canonical_schema
from penstock.changes.commit_tracker import commit_tracker_address
from penstock.changes.options import COMMIT, EVER, ChangeOptions
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import EVENT_TIME, Layout, Path
from penstock.changes.schema import check_arrow_types, layout_of, type_at, with_contract_metadata
from penstock.changes.stage import AllPasses, CommitReporter, FirstPass, Packing, is_hashable
from penstock.errors import InvalidChangeOptionError
from penstock.feeds.contract import ChangeContract
from penstock.spark.internals.plans import fingerprint
from penstock.spark.internals.sessions import is_classic
from penstock.spark.schemas import is_case_sensitive, quote_column, to_struct
from penstock.spark.shuffle_batches import SCHEMA, SHUFFLE_KEY, shuffle_keys

_KEY = "__penstock_key_"
# With this name (Spark 4.2) and this metadata (Spark 4.3), Spark refuses update and complete mode when a
# query starts.
_EVENTS = "__spark_cdc_events"
_STREAMING_METADATA = {"spark.cdc.streamingPostProcessing": True}
_WATERMARK = "spark.watermarkDelayMs"


def post_process(
    df: DataFrame,
    contract: ChangeContract,
    *,
    deduplication_mode: str = "dropCarryovers",
    compute_updates: bool = False,
    strategy: str = "auto",
    watermark_delay: str = "0 seconds",
    keep_watermark: bool = False,
    net_window: str | None = None,
) -> DataFrame:
    """Remove carry-over rows, detect updates and compute net changes, as the contract allows.

    The rules are those of Spark 4.3's ``changes()``. A pass that the feed does not need is left out, with a
    warning if it was requested; without any pass the result is ``df`` itself. If the contract has
    ``unchanged``, the columns have metadata that tells a ``TableSink`` which values to keep.

    Parameters
    ----------
    df
        Change rows, batch or streaming: data columns with ``_change_type`` (string), ``_commit_version``
        (bigint or string) and ``_commit_timestamp`` (timestamp).
    contract
        The contract of the feed.
    deduplication_mode
        ``none``, ``dropCarryovers`` or ``netChanges`` (carry-overs are dropped too).
    compute_updates
        Whether a delete and an insert of one row in one commit become ``update_preimage`` and
        ``update_postimage``.
    strategy
        On a stream, ``micro_batch`` for commits that are whole in a micro-batch (stateless; append and update
        mode), ``watermark`` for others (append mode), or ``auto``, which follows the contract.
    watermark_delay
        For ``watermark``: how far, in commit time, a commit may lag behind the newest one, such as ``10
        seconds``.
    keep_watermark
        Whether ``_commit_timestamp`` keeps an event-time watermark for later operators.
    net_window
        For ``netChanges``: ``commit``, or an interval of commit time such as ``1 hour``; required on a
        stream. The windows of an interval begin at 1970-01-01 00:00 UTC. A stream emits the net changes of an
        interval once it has read a commit after its end.

    Raises
    ------
    InvalidChangeOptionError, InvalidChangelogSchemaError
        Immediately.
    ChangelogContractViolationError
        When the query runs, if the feed violates its contract.
    """
    require("df", df, DataFrame, "a DataFrame with change rows")
    expected = "a penstock.ChangeContract, such as penstock.ChangeContract('id')"
    require("contract", contract, ChangeContract, expected)
    options = ChangeOptions.of(
        deduplication_mode, compute_updates, net_window, strategy, watermark_delay, keep_watermark
    )
    _warn_of_unneeded_passes(contract, options)
    if net_window is not None and not options.net_changes:
        warnings.warn("net_window has no effect without deduplication_mode='netChanges'", stacklevel=2)
    if contract.unchanged is not None:
        df = df.to(with_contract_metadata(df.schema, contract, net=options.net_changes))
    return process(df, contract, options)


def process(df: DataFrame, contract: ChangeContract, options: ChangeOptions) -> DataFrame:
    """Run the passes of :func:`post_process` without its warnings, for a feed that defines its contract."""
    layout = layout_of(df.schema, contract, case_sensitive=is_case_sensitive(df.sparkSession))
    rewrites_rows = contract.updates_as_delete_and_insert and contract.carryover_rows
    if options.compute_updates and rewrites_rows and not options.drop_carryovers:
        raise InvalidChangeOptionError(
            "compute_updates cannot distinguish updates from carry-overs with deduplication_mode='none': use "
            "dropCarryovers",
            condition="INVALID_CDC_OPTION.UPDATE_DETECTION_REQUIRES_CARRY_OVER_REMOVAL",
        )
    passes = Passes.of(contract, options)
    if passes:
        check_arrow_types(df.schema)
        plan = Plan(df, layout, passes, fingerprint(df, repr(contract)))
        if df.isStreaming and _stream_strategy(df, options.strategy, contract, passes) == "watermark":
            return plan.by_watermark(options.delay_ms, keep_watermark=options.keep_watermark)
        df = plan.stateless()
    if options.keep_watermark and df.isStreaming:
        return df.withWatermark(df.schema.names[layout.timestamp], f"{options.delay_ms} milliseconds")
    return df


def _warn_of_unneeded_passes(contract: ChangeContract, options: ChangeOptions) -> None:
    """Warn about requested passes that the contract does not need, because a flag of it may be missing."""
    net = options.net_changes and contract.intermediate_changes
    updates = net or contract.updates_as_delete_and_insert
    for requested, needed, option, flag in (
        (options.net_changes, net, "deduplication_mode='netChanges'", "intermediate_changes"),
        (options.compute_updates, updates, "compute_updates=True", "updates_as_delete_and_insert"),
    ):
        if requested and not needed:
            warnings.warn(
                f"{option} has no effect with this contract: set {flag}=True if the feed has such changes, "
                "or leave the option out",
                stacklevel=3,
            )


def _stream_strategy(df: DataFrame, chosen: str, contract: ChangeContract, passes: Passes) -> str:
    if not is_classic(df.sparkSession):
        raise InvalidChangeOptionError(
            "the passes of a stream track commits in the driver, which a Spark Connect session cannot reach: "
            "use a classic session (SparkSession.builder.master(...)), or read the feed as a batch",
            condition="INVALID_CDC_OPTION.CLASSIC_SESSION_NEEDED",
        )
    if passes.net == EVER:
        raise InvalidChangeOptionError(
            "the net changes of a whole stream are never complete: set net_window='commit' for net changes "
            "of each commit, or an interval such as net_window='1 hour' for net changes that are emitted "
            "when the interval has ended; or read the feed as a batch",
            condition="INVALID_CDC_OPTION.STREAMING_NET_CHANGES_NOT_SUPPORTED",
        )
    windowed = passes.net not in (None, COMMIT)
    if chosen == "auto":
        if contract.whole_commits is None:
            raise InvalidChangeOptionError(
                "the contract does not say whether commits are whole in a micro-batch: set "
                "whole_commits=True for the micro_batch strategy (stateless; a split commit fails the "
                "query), or whole_commits=False for the watermark strategy (rows wait for watermark_delay; "
                "append mode only)",
                condition="INVALID_CDC_OPTION.STRATEGY_UNKNOWN",
            )
        return "micro_batch" if contract.whole_commits and not windowed else "watermark"
    if chosen == "micro_batch" and (not contract.whole_commits or windowed):
        why = (
            "an interval as net_window is longer than a micro-batch"
            if windowed
            else "the contract does not have whole_commits=True"
        )
        raise InvalidChangeOptionError(
            f"strategy='micro_batch' cannot be used, because {why}: use 'watermark', or 'auto'",
            condition="INVALID_CDC_OPTION.STRATEGY_NOT_APPLICABLE",
        )
    return chosen


@dataclass(frozen=True)
class Plan:
    """The passes to run on one feed."""

    df: DataFrame
    layout: Layout
    passes: Passes
    feed: str

    def stateless(self) -> DataFrame:
        """Shuffle rows with the same row id into one task; some pairs that cancel are dropped before that."""
        ids = [type_at(self.df.schema, path) for path in self.layout.row_id]
        fields = [StructField(str(number), kind) for number, kind in enumerate(ids)]
        if is_hashable(canonical_schema(StructType(fields)).types):
            partitions = int(str(self.df.sparkSession.conf.get("spark.sql.shuffle.partitions")))
            packing = Packing(self.layout.row_id, shuffle_keys(partitions))
            packed = self.df.mapInArrow(self._first_pass(packing=packing), to_struct(SCHEMA))
            passes = AllPasses(self.layout, self.passes, packed=True)
            return packed.repartition(SHUFFLE_KEY).mapInArrow(passes, self.df.schema)
        columns = [self._column(path) for path in self.layout.row_id]
        if not self.passes.carryovers:
            return self.df.repartition(*columns).mapInArrow(self._first_pass(whole=True), self.df.schema)
        first = self.df.mapInArrow(self._first_pass(), self.df.schema)
        return first.repartition(*columns).mapInArrow(AllPasses(self.layout, self.passes), self.df.schema)

    def by_watermark(self, delay_ms: int, *, keep_watermark: bool) -> DataFrame:
        """Collect rows with the same row id in the state store until the watermark passes them.

        This is the plan that Spark 4.3 uses, with event times in milliseconds, the unit of its watermark.
        """
        checked = self.df.mapInArrow(self._first_pass(delay_ms=delay_ms), self.df.schema)
        timed = checked.withColumn(
            EVENT_TIME, F.timestamp_millis(F.unix_millis(self._column((self.layout.timestamp,))))
        )
        marked = timed.withWatermark(EVENT_TIME, f"{delay_ms} milliseconds")
        keys = [self._column(path).alias(f"{_KEY}{place}") for place, path in enumerate(self.layout.row_id)]
        if self.passes.net in (None, COMMIT):
            keys += [self._column((self.layout.version,)).alias(f"{_KEY}version"), F.col(EVENT_TIME)]
        else:
            keys.append(F.window(EVENT_TIME, f"{self.passes.net} microseconds").alias(f"{_KEY}window"))
        row = F.struct(*[F.col(quote_column(name)) for name in self.df.columns])
        events = F.collect_list(row).alias(_EVENTS, metadata=_STREAMING_METADATA)
        collected = marked.groupBy(*keys).agg(events).select(F.inline(_EVENTS))
        schema = self._with_watermark(delay_ms) if keep_watermark else self.df.schema
        return collected.mapInArrow(AllPasses(self.layout, self.passes), schema)

    def _first_pass(
        self, *, whole: bool = False, packing: Packing | None = None, delay_ms: int | None = None
    ) -> FirstPass:
        session = self.df.sparkSession
        reporter = None
        if is_classic(session):
            address = commit_tracker_address(session)
            reporter = CommitReporter(address, self.feed, delay_ms, self.df.isStreaming, self.layout.repeats)
        return FirstPass(self.layout, self.passes, reporter, whole, packing)

    def _column(self, path: Path) -> Column:
        names, struct = [], self.df.schema
        for index in path:
            field = struct.fields[index]
            names.append(quote_column(field.name))
            struct = field.dataType  # type: ignore[assignment]  # a struct, except for the last one
        return F.col(".".join(names))

    def _with_watermark(self, delay_ms: int) -> StructType:
        fields = list(self.df.schema.fields)
        field = fields[self.layout.timestamp]
        metadata = {**field.metadata, _WATERMARK: delay_ms}
        fields[self.layout.timestamp] = StructField(field.name, field.dataType, field.nullable, metadata)
        return StructType(fields)
