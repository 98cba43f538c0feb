-- name: settings
-- Set the search path first, because the second statement looks up operators and tables in it. Some settings do not
-- exist on older servers, or on some systems.
SET search_path TO pg_catalog, pg_temp;
SELECT set_config(s.name, v.value, false)
FROM (VALUES
    ('datestyle', 'ISO, YMD'),
    ('intervalstyle', 'postgres'),
    ('timezone', 'UTC'),
    ('extra_float_digits', '1'),
    ('bytea_output', 'hex'),
    ('lc_monetary', 'C'),
    ('row_security', 'off'),
    ('statement_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'),
    ('transaction_timeout', '0'),
    ('jit', 'off'),
    -- With this on, the planner would evaluate the checks of partitions.
    ('constraint_exclusion', 'off'),
    -- Without this, a backend that decodes for a disconnected client keeps using the slot.
    ('client_connection_check_interval', '1s')
) AS v (name, value)
JOIN pg_settings AS s ON s.name = v.name;

-- name: server
SELECT current_setting('server_version_num')::int AS version,
    current_setting('wal_level') AS wal_level,
    current_setting('server_encoding') AS encoding,
    current_database() AS database;

-- name: system
SELECT system_identifier FROM pg_control_system();

-- name: publication
SELECT pubupdate OR pubdelete AS changes_rows, pubinsert AND pubupdate AND pubdelete AS all_changes,
    concat(oid, '.', xmin, '.',
        CASE WHEN puballtables THEN 'a' END, CASE WHEN pubinsert THEN 'i' END, CASE WHEN pubupdate THEN 'u' END,
        CASE WHEN pubdelete THEN 'd' END, CASE WHEN pubtruncate THEN 't' END, CASE WHEN pubviaroot THEN 'r' END
    ) AS state
FROM pg_publication WHERE pubname = :publication;

-- name: published_tables
-- The tables of a publication, why they are part of it, and a stamp that changes with their definition. The server
-- lists the tables with functions, which see changes that were committed after the snapshot of this statement. A table
-- without a reason in the snapshot was added later, and is left to the next execution.
WITH RECURSIVE published_schema AS MATERIALIZED (
    SELECT e.oid AS entry, e.pnnspid AS schema
    FROM pg_publication AS b JOIN pg_publication_namespace AS e ON e.pnpubid = b.oid
    WHERE b.pubname = :publication
), listed AS (
    SELECT c.oid, c.xmin, c.relkind, c.relnatts, c.relreplident,
        p.schemaname || '.' || p.tablename AS name,
        b.puballtables, p.attnames AS columns
    FROM pg_publication AS b
    JOIN pg_publication_tables AS p ON p.pubname = b.pubname
    JOIN pg_namespace AS n ON n.nspname = p.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = p.tablename
    WHERE b.pubname = :publication AND p.schemaname <> 'penstock_snapshots'
), relative (of, oid, below, attached) AS (
    -- A table, and the tables above it of which it is a partition.
    SELECT l.oid, l.oid, NULL::oid, NULL FROM listed AS l
    UNION ALL
    SELECT r.of, i.inhparent, i.inhrelid, concat('p', i.xmin)
    FROM relative AS r JOIN pg_inherits AS i ON i.inhrelid = r.oid
    JOIN pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
    WHERE NOT i.inhdetachpending
), reason AS (
    SELECT r.of AS oid, coalesce(
        max(e.oid::text) FILTER (WHERE r.oid = r.of),
        max(m.stamp) FILTER (WHERE r.oid = r.of),
        -- A partition that is only published because a table above it is published.
        CASE WHEN count(e.oid) + count(m.stamp) > 0 THEN concat_ws('.',
            string_agg(e.oid::text, '.' ORDER BY e.oid),
            string_agg(m.stamp, '.' ORDER BY r.oid),
            string_agg(r.attached, '.' ORDER BY r.below)) END) AS reason
    FROM relative AS r
    LEFT JOIN pg_publication_rel AS e ON e.prrelid = r.oid
        AND e.prpubid = (SELECT b.oid FROM pg_publication AS b WHERE b.pubname = :publication)
    LEFT JOIN LATERAL (
        -- The dependency on the schema is recorded when a table is created or moved to another schema.
        SELECT concat('s', s.entry, '.', d.xmin) AS stamp
        FROM pg_class AS c
        JOIN published_schema AS s ON s.schema = c.relnamespace
        JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0
            AND d.refclassid = 'pg_namespace'::regclass
        WHERE c.oid = r.oid
        -- OFFSET 0 makes this use indexes for each row: the planner expects few tables, and would join all.
        OFFSET 0
    ) AS m ON true
    GROUP BY r.of
), published AS (
    SELECT l.*, s.reason FROM listed AS l JOIN reason AS s ON s.oid = l.oid
    WHERE l.puballtables OR s.reason IS NOT NULL
), member (root, oid, attached) AS (
    -- A row is added to pg_inherits when a partition is created or attached.
    SELECT t.oid, t.oid, ARRAY[]::text[] FROM published AS t
    UNION ALL
    SELECT m.root, i.inhrelid, m.attached || i.xmin::text
    FROM member AS m JOIN pg_inherits AS i ON i.inhparent = m.oid
    JOIN pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
    WHERE NOT i.inhdetachpending
), leaves AS (
    SELECT m.root, jsonb_object_agg(m.oid, array_to_string(m.attached, '.')) AS attached,
        array_agg(m.oid::regclass::text ORDER BY m.oid) FILTER (WHERE c.relpersistence = 'u') AS unlogged
    FROM member AS m JOIN pg_class AS c ON c.oid = m.oid AND c.relkind <> 'p'
    GROUP BY m.root
)
SELECT t.oid, t.name, t.relnatts AS width, t.relreplident AS identity,
    concat_ws('.', t.oid, t.reason) AS entry,
    CASE WHEN t.relkind = 'p' THEN coalesce(l.attached, '{}') END AS partitions,
    coalesce(l.unlogged, ARRAY[]::text[]) AS unlogged,
    (SELECT jsonb_object_agg(a.attname, jsonb_build_array(a.attnum, a.atttypid::bigint, a.atttypmod))
        FROM pg_attribute AS a
        WHERE a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
            AND a.attname = ANY (t.columns)) AS columns,
    k.oid AS key, k.conkey AS key_columns,
    md5(concat(t.xmin, '/',
        (SELECT string_agg(a.attnum || ':' || a.xmin, ' ' ORDER BY a.attnum) FROM pg_attribute AS a
            WHERE a.attrelid = t.oid AND a.attnum > 0), '/',
        (SELECT string_agg(i.indexrelid || ':' || i.xmin, ' ' ORDER BY i.indexrelid) FROM pg_index AS i
            WHERE i.indrelid = t.oid))) AS stamp
FROM published AS t
LEFT JOIN leaves AS l ON l.root = t.oid
LEFT JOIN pg_constraint AS k ON k.conrelid = t.oid AND k.contype = 'p' AND NOT k.condeferrable
ORDER BY t.name;

-- name: position
-- The end of the log, which includes all changes that are visible in the catalog now.
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END - '0/0'
    AS position, pg_is_in_recovery() AS standby,
    (extract(epoch FROM statement_timestamp()) * 1000000)::bigint AS now;

-- name: transaction
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next,
    -- A standby does not report its timeline.
    CASE WHEN pg_is_in_recovery() THEN 0
        ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END AS timeline;

-- name: origins
-- When tables were created, and whether partitions were created as partitions (and not attached later). The catalog
-- rows of system columns are never updated, so they show when the table was created.
SELECT c.oid, c.oid::regclass::text AS name,
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint - age(m.xmin) AS created,
    EXISTS (SELECT FROM pg_publication AS b JOIN pg_publication_rel AS r ON r.prpubid = b.oid
        WHERE b.pubname = :publication AND r.prrelid = c.oid) AS named,
    NOT EXISTS (SELECT FROM pg_partition_ancestors(c.oid) AS a
        JOIN pg_inherits AS i ON i.inhrelid = a.relid
        JOIN pg_attribute AS n ON n.attrelid = a.relid AND n.attnum = -6
        WHERE i.xmin::text <> n.xmin::text) AS created_as_is
FROM pg_class AS c
JOIN pg_attribute AS m ON m.attrelid = c.oid AND m.attnum = -6
WHERE c.oid = ANY (:oids::oid[]);

-- name: partition_roots
SELECT c.oid, pg_partition_root(c.oid)::oid AS root
FROM pg_class AS c WHERE c.oid = ANY (:oids::oid[]) AND c.relispartition;

-- name: changing
-- busy: whether a transaction may be altering a table, or has altered one and is not visible yet. alone: whether one
-- has, or waits for, an exclusive lock, so that the tables of a publication cannot be listed. A prepared transaction
-- has locks without a process.
SELECT count(*) FILTER (WHERE l.granted) > 0 AS busy,
    count(*) FILTER (WHERE l.mode = 'AccessExclusiveLock') > 0 AS alone
FROM pg_locks AS l
LEFT JOIN pg_stat_activity AS s ON s.pid = l.pid
WHERE l.locktype = 'relation' AND l.relation >= 16384 AND l.pid IS DISTINCT FROM pg_backend_pid()
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.mode IN (
        'ShareUpdateExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
    AND s.backend_type IS DISTINCT FROM 'autovacuum worker';

-- name: domains
-- The base types of domains, at any depth.
WITH RECURSIVE base (oid, type, modifier) AS (
    SELECT y.oid, y.typbasetype, y.typtypmod FROM pg_type AS y
    WHERE y.typtype = 'd' AND y.oid = ANY (:oids::oid[])
    UNION ALL
    SELECT b.oid, y.typbasetype, CASE WHEN y.typtypmod >= 0 THEN y.typtypmod ELSE b.modifier END
    FROM base AS b JOIN pg_type AS y ON y.oid = b.type AND y.typtype = 'd'
)
SELECT b.oid, b.type, b.modifier
FROM base AS b JOIN pg_type AS y ON y.oid = b.type AND y.typtype <> 'd';

-- name: relations
-- The relations of the rows after a commit, in log order. The messages between two Relation messages form a group. The
-- result has the Relation message of each group (data), a row for each relation with rows, and each TRUNCATE (data).
WITH message AS (
    SELECT number, data, get_byte(data, 0) AS kind
    FROM pg_logical_slot_peek_binary_changes(
        :slot, :upto::pg_lsn, :messages, 'proto_version', '1', 'publication_names', :names
    ) WITH ORDINALITY AS p (lsn, xid, data, number)
), placed AS (
    SELECT number, kind,
        CASE WHEN kind IN (82, 84) THEN data END AS data,
        CASE WHEN kind IN (73, 68, 85)
            THEN ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint END AS oid,
        max(CASE WHEN kind = 66
            THEN ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::bigint END) OVER so_far AS version,
        count(*) FILTER (WHERE kind = 82) OVER so_far AS form
    FROM message
    WINDOW so_far AS (ORDER BY number ROWS UNBOUNDED PRECEDING)
)
SELECT min(number) AS number, oid, string_agg(data, NULL) AS data, min(version) AS version
FROM placed
WHERE kind IN (82, 84)
    OR (oid IS NOT NULL AND version > :after AND version <> ALL (:skipped::bigint[])
        AND oid <> ALL (:others::oid[]::bigint[]))
GROUP BY form, oid, CASE WHEN kind = 84 THEN number ELSE 0 END
ORDER BY 1;

-- name: descriptions
-- The relations and truncations in the log, without rows, which takes a third of the time.
SELECT data
FROM pg_logical_slot_peek_binary_changes(
    :slot, :upto::pg_lsn, NULL, 'proto_version', '1', 'publication_names', :names
)
WHERE get_byte(data, 0) IN (82, 84);

-- name: columns
SELECT t.oid, t.schemaname AS schema, t.tablename AS table, t.relkind AS kind, t.relreplident AS identity,
    t.rowfilter,
    a.attname AS name, a.atttypid AS type, a.atttypmod AS modifier,
    coalesce(a.attnum = ANY (i.indkey), false) AS key, i.key_columns
FROM (
    SELECT c.oid, p.schemaname, p.tablename, c.relkind, c.relreplident,
        p.attnames AS names, p.rowfilter
    FROM pg_publication_tables AS p
    JOIN pg_namespace AS n ON n.nspname = p.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = p.tablename
    WHERE p.pubname = :publication AND p.schemaname <> 'penstock_snapshots'
) AS t
JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN LATERAL (
    -- A deferrable key cannot be a replica identity.
    SELECT x.indkey, cardinality(x.indkey::int2[]) AS key_columns FROM pg_index AS x
    WHERE x.indrelid = t.oid AND x.indislive AND x.indimmediate
        AND CASE WHEN t.relreplident = 'i' THEN x.indisreplident ELSE x.indisprimary END
    LIMIT 1
) AS i ON true
WHERE a.attname = ANY (t.names)
    -- Servers before 18 do not send generated columns, although 15 lists them.
    AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 180000)
ORDER BY t.schemaname, t.tablename, a.attnum;

-- name: slot
SELECT current_database() AS here,
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END - '0/0'
        AS flushed,
    -- All commits that were visible at the time "now" are before this position.
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END - '0/0'
        AS written,
    (extract(epoch FROM statement_timestamp()) * 1000000)::bigint AS now,
    (SELECT count(*) > 0 FROM pg_publication WHERE pubname = :publication) AS published,
    s.plugin, s.slot_type AS type, s.database, s.active_pid AS pid,
    (to_jsonb(s) ->> 'two_phase')::boolean AS two_phase,
    s.restart_lsn - '0/0' AS restart, s.confirmed_flush_lsn - '0/0' AS confirmed,
    s.wal_status, to_jsonb(s) ->> 'invalidation_reason' AS reason
FROM (VALUES (1)) AS one (n)
LEFT JOIN pg_replication_slots AS s ON s.slot_name = :slot;

-- name: oldest_transaction
-- The oldest transaction that has written data; its id is visible to every role.
SELECT s.backend_xid::text AS number, s.pid, s.state, s.query,
    extract(epoch FROM clock_timestamp() - s.xact_start)::float8 AS seconds, age(s.backend_xid) AS age
FROM pg_stat_activity AS s
WHERE s.backend_xid IS NOT NULL AND s.pid <> pg_backend_pid()
UNION ALL
SELECT p.transaction::text, NULL, 'prepared', quote_literal(p.gid),
    extract(epoch FROM clock_timestamp() - p.prepared)::float8, age(p.transaction)
FROM pg_prepared_xacts AS p
ORDER BY age DESC LIMIT 1;

-- name: advance
SELECT pg_replication_slot_advance(:slot, :upto::pg_lsn);

-- name: others
-- Existing relations whose rows are not read, because they are not chosen. Dropped tables and tables with the name of
-- a chosen one are not included, because they may have been chosen, or have replaced a chosen table.
SELECT c.oid
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p')
    AND (n.nspname = 'penstock_snapshots'
        OR (:chosen::oid[] IS NOT NULL AND c.oid >= 16384 AND c.oid <> ALL (:chosen::oid[])
            AND n.nspname || '.' || c.relname <> ALL (:names::text[])));

-- name: commits
-- The messages of a transaction have its id. An id is unique in the log of a slot, because a slot prevents the
-- wraparound of transaction ids.
WITH message AS (
    SELECT number, xid, data, get_byte(data, 0) AS kind
    FROM pg_logical_slot_peek_binary_changes(
        :slot, :upto::pg_lsn, :messages, 'proto_version', '1', 'publication_names', :names
    ) WITH ORDINALITY AS p (lsn, xid, data, number)
), counted AS (
    SELECT max(number) AS number,
        string_agg(CASE WHEN kind = 67 THEN data END, NULL) AS ending,
        sum(CASE
            WHEN kind = 84 THEN 1
            WHEN kind NOT IN (73, 68, 85) THEN 0
            WHEN (:others::oid[])[1] IS NOT NULL
                AND ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint = ANY (:others::oid[]::bigint[])
                THEN 0
            WHEN kind = 85 AND get_byte(data, 5) <> 78 THEN 2
            ELSE 1
        END) AS rows
    FROM message GROUP BY xid
)
SELECT number, rows,
    ('x' || encode(substr(ending, 3, 8), 'hex'))::bit(64)::bigint AS version,
    ('x' || encode(substr(ending, 19, 8), 'hex'))::bit(64)::bigint + 946684800000000 AS timestamp
FROM counted ORDER BY number;

-- name: probe
WITH message AS (
    SELECT number, data, get_byte(data, 0) AS kind
    FROM pg_logical_slot_peek_binary_changes(
        :slot, :upto::pg_lsn, :messages, 'proto_version', '1', 'publication_names', :names
    ) WITH ORDINALITY AS p (lsn, xid, data, number)
)
SELECT count(*) AS messages,
    max(number) FILTER (WHERE CASE WHEN kind = 67
        THEN ('x' || encode(substr(data, 3, 8), 'hex'))::bit(64)::bigint <= :after ELSE false END) AS last_commit,
    max(number) FILTER (WHERE CASE
        WHEN kind = 84 THEN true
        WHEN kind NOT IN (73, 68, 85) THEN false
        WHEN (:others::oid[])[1] IS NULL THEN true
        ELSE ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint <> ALL (:others::oid[]::bigint[])
    END) AS last_change
FROM message;

-- name: messages
SELECT data
FROM pg_logical_slot_peek_binary_changes(
    :slot, :upto::pg_lsn, NULL, 'proto_version', '1', 'publication_names', :names
);

-- name: chosen_messages
SELECT data
FROM pg_logical_slot_peek_binary_changes(
    :slot, :upto::pg_lsn, NULL, 'proto_version', '1', 'publication_names', :names
)
WHERE CASE WHEN get_byte(data, 0) IN (73, 68, 85)
    THEN ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint <> ALL (:others::oid[]::bigint[])
    ELSE true END;

-- name: snapshots_table
-- A role that only reads from a slot needs no privileges for the snapshots.
SELECT count(*) > 0 AS exists,
    coalesce(bool_and(has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')), true)
        AS visible
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = 'penstock_snapshots' AND c.relname = 'slots';

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS penstock_snapshots;

-- name: create_slots
CREATE TABLE IF NOT EXISTS penstock_snapshots.slots (
    slot text PRIMARY KEY,
    state text NOT NULL CHECK (state IN ('copying', 'complete', 'read')),
    consistent_point bigint,
    copied_at bigint,
    tables jsonb NOT NULL DEFAULT '[]',
    publication jsonb
);

-- name: snapshot
SELECT state, consistent_point, copied_at, tables, publication
FROM penstock_snapshots.slots WHERE slot = :slot;

-- name: begin_snapshot
INSERT INTO penstock_snapshots.slots (slot, state) VALUES (:slot, 'copying')
ON CONFLICT (slot) DO UPDATE SET state = 'copying', consistent_point = NULL, copied_at = NULL, tables = '[]';

-- Both functions use the current catalog, and not the transaction's snapshot of it. A view has no file.
-- name: is_table
-- A table that was rewritten after the transaction's snapshot has another file now, and looks empty in the snapshot.
WITH RECURSIVE member (oid) AS (
    SELECT :oid::oid
    UNION ALL
    SELECT i.inhrelid
    FROM member AS m
    JOIN pg_class AS c ON c.oid = m.oid AND c.relkind = 'p'
    JOIN pg_inherits AS i ON i.inhparent = m.oid
)
SELECT (
    to_regclass(:name)::oid = :oid::oid AND (:partitioned::boolean OR pg_relation_filenode(:oid::oid) IS NOT NULL)
    AND NOT EXISTS (
        SELECT FROM member AS m JOIN pg_class AS c ON c.oid = m.oid
        WHERE c.relkind = 'r' AND c.relfilenode IS DISTINCT FROM pg_relation_filenode(c.oid))
) IS TRUE AS same;

-- name: foreign_functions
-- Functions of untrusted roles that PostgreSQL may run when it plans a query on the tables. The planner evaluates the
-- constant parts of indexes, extended statistics and partition keys (also of checks, unless constraint_exclusion is
-- off). Built-in objects are pinned, and not in pg_depend.
WITH RECURSIVE member (root, oid) AS (
    SELECT t.oid, t.oid FROM unnest(:oids::oid[]) AS t (oid)
    UNION ALL
    SELECT m.root, i.inhrelid
    FROM member AS m
    -- The children of tables that are not partitioned are not read.
    JOIN pg_class AS c ON c.oid = m.oid AND c.relkind = 'p'
    JOIN pg_inherits AS i ON i.inhparent = m.oid
), object (root, class, oid) AS (
    SELECT m.root, 'pg_class'::regclass, i.indexrelid
    FROM member AS m JOIN pg_index AS i ON i.indrelid = m.oid
    UNION ALL
    SELECT m.root, 'pg_statistic_ext'::regclass, s.oid
    FROM member AS m JOIN pg_statistic_ext AS s ON s.stxrelid = m.oid
    UNION
    -- Partition keys: the rows of a partition are bounded by the keys of all tables above it.
    SELECT m.root, 'pg_class'::regclass, a.relid::oid
    FROM member AS m CROSS JOIN LATERAL pg_partition_ancestors(m.oid) AS a
), dependency AS (
    SELECT o.root, o.class, o.oid, d.refclassid, d.refobjid
    FROM object AS o
    JOIN pg_depend AS d ON d.classid = o.class AND d.objid = o.oid AND d.objsubid = 0
), used (root, class, oid, used_class, used, owner) AS (
    SELECT d.*, p.proowner
    FROM dependency AS d JOIN pg_proc AS p ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
    UNION ALL
    -- The owner of an operator can define a negator, which the planner may use instead of it.
    SELECT d.*, r.oprowner
    FROM dependency AS d JOIN pg_operator AS r ON d.refclassid = 'pg_operator'::regclass AND r.oid = d.refobjid
    UNION ALL
    SELECT d.root, d.class, d.oid, 'pg_proc'::regclass, p.oid, p.proowner
    FROM dependency AS d
    JOIN pg_operator AS r ON d.refclassid = 'pg_operator'::regclass AND r.oid = d.refobjid
    JOIN pg_proc AS p ON p.oid = r.oprcode
    UNION ALL
    -- A domain may have checks, also inside another type. An enum runs no code.
    SELECT d.*, y.typowner
    FROM dependency AS d
    JOIN pg_type AS y ON d.refclassid = 'pg_type'::regclass AND y.oid = d.refobjid
    LEFT JOIN pg_type AS e ON y.typtype = 'b' AND e.oid = y.typelem
    WHERE 'e' NOT IN (y.typtype, coalesce(e.typtype, y.typtype))
)
SELECT u.root AS oid, o.type AS object_type, o.identity AS object, f.type AS used_type, f.identity AS used,
    r.rolname::text AS owner, current_user::text AS role
FROM used AS u
JOIN pg_roles AS r ON r.oid = u.owner
CROSS JOIN LATERAL pg_identify_object(u.class, u.oid, 0) AS o
CROSS JOIN LATERAL pg_identify_object(u.used_class, u.used, 0) AS f
WHERE NOT r.rolsuper
    AND r.rolname <> ALL (:trusted::text[])
    AND r.rolname NOT IN (current_user, session_user)
    AND r.oid NOT IN (SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database())
ORDER BY u.root, u.class, u.oid, u.used
LIMIT 1;

-- name: end_snapshot
UPDATE penstock_snapshots.slots
SET state = 'complete', consistent_point = :point, tables = :tables::jsonb, publication = :publication::jsonb,
    copied_at = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
WHERE slot = :slot;

-- name: snapshot_read
UPDATE penstock_snapshots.slots SET state = 'read', tables = '[]' WHERE slot = :slot;

-- name: drop_slot
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = :slot;

-- name: lock
SELECT pg_advisory_lock(hashtextextended('penstock slot ' || :slot, 0));

-- Limits how long the server waits for a client that stops in the middle of a copy, and for a lock.
-- name: limit_waiting
SELECT set_config('idle_in_transaction_session_timeout', '10s', false) AS idle,
    set_config('lock_timeout', :wait, false) AS wait;

-- name: lock_holder
SELECT l.pid
FROM pg_locks AS l, hashtextextended('penstock slot ' || :slot, 0) AS key
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.classid::bigint = (key >> 32) & 4294967295 AND l.objid::bigint = key & 4294967295
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database());


-- name: end_reader
-- Terminates a process that still streams from the slot for a pump with this name.
SELECT pg_terminate_backend(a.pid)
FROM pg_replication_slots AS s JOIN pg_stat_activity AS a ON a.pid = s.active_pid
WHERE s.slot_name = :slot AND a.application_name = :application;

-- name: read_chunk
-- A parallel plan may return rows in another order.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SET LOCAL max_parallel_workers_per_gather = 0;

-- name: visible
-- The transactions that are visible to this one.
SELECT pg_snapshot_xmin(s)::text::bigint AS oldest, pg_snapshot_xmax(s)::text::bigint AS next,
    ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(s) AS x) AS running,
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS timestamp
FROM (SELECT pg_current_snapshot() AS s) AS now;

-- name: chunk_session
-- Do not wait for a synchronous standby that is down.
SET synchronous_commit TO local;

-- name: mark
-- A position after all visible commits, which the log reaches even if nothing else is written.
SELECT pg_logical_emit_message(true, 'penstock', ''::text) - '0/0' AS position;

-- name: current_columns
SELECT a.attname AS name, a.atttypid AS type, a.atttypmod AS modifier
FROM pg_attribute AS a
WHERE a.attrelid = :oid::oid AND a.attnum > 0 AND NOT a.attisdropped;

-- name: row_filter
SELECT p.rowfilter
FROM pg_publication_tables AS p
JOIN pg_namespace AS n ON n.nspname = p.schemaname
JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = p.tablename
WHERE p.pubname = :publication AND c.oid = :oid::oid;

-- name: key_columns
-- How the values of key columns are compared. The types of extensions are excluded, because their operators may have
-- any name. Domains are resolved, because a domain may run a function of its owner.
WITH RECURSIVE base (name, type, at) AS (
    SELECT a.attname, a.atttypid, 0
    FROM pg_attribute AS a
    WHERE a.attrelid = :oid::oid AND a.attname = ANY (:names::text[]) AND NOT a.attisdropped
    UNION ALL
    SELECT b.name, y.typbasetype, b.at + 1
    FROM base AS b JOIN pg_type AS y ON y.oid = b.type AND y.typtype = 'd'
)
SELECT DISTINCT ON (a.attname) a.attname AS name, format_type(y.oid, -1) AS type,
    (y.oid < 16384 AND y.typname NOT LIKE 'reg%') OR y.typtype = 'e' AS comparable,
    quote_ident(n.nspname) || '.' || quote_ident(c.collname) AS collation
FROM base AS b
JOIN pg_attribute AS a ON a.attrelid = :oid::oid AND a.attname = b.name
JOIN pg_type AS y ON y.oid = b.type
LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
LEFT JOIN pg_namespace AS n ON n.oid = c.collnamespace
ORDER BY a.attname, b.at DESC;

-- name: row_estimate
-- The server's estimate of the number of rows of a table, including its partitions; 0 if there is none.
WITH RECURSIVE member (oid) AS (
    SELECT :oid::oid
    UNION ALL
    SELECT i.inhrelid FROM member AS m JOIN pg_inherits AS i ON i.inhparent = m.oid
)
SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint AS rows
FROM member AS m JOIN pg_class AS c ON c.oid = m.oid AND c.relkind <> 'p';
