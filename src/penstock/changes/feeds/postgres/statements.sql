-- name: settings
-- Some settings are not there in older servers, or not on every system.
SELECT set_config(s.name, v.value, false)
FROM (VALUES
    ('datestyle', 'ISO, YMD'),
    ('intervalstyle', 'postgres'),
    ('timezone', 'UTC'),
    ('extra_float_digits', '1'),
    ('bytea_output', 'hex'),
    ('lc_monetary', 'C'),
    ('search_path', 'pg_catalog'),
    ('row_security', 'off'),
    ('statement_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'),
    ('transaction_timeout', '0'),
    ('jit', 'off'),
    -- A backend that decodes for a client that is gone would hold the slot.
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
SELECT puballtables AS every_table, pubupdate OR pubdelete AS changes_rows
FROM pg_publication WHERE pubname = :publication;

-- name: columns
-- Domains are what they are made of, however deep.
WITH RECURSIVE published AS (
    SELECT c.oid, p.schemaname, p.tablename, c.relkind, c.relreplident,
        to_jsonb(p) -> 'attnames' AS names, to_jsonb(p) ->> 'rowfilter' AS rowfilter
    FROM pg_publication_tables AS p
    JOIN pg_namespace AS n ON n.nspname = p.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = p.tablename
    WHERE p.pubname = :publication AND p.schemaname <> 'penstock_snapshots'
), identity AS (
    SELECT t.oid, i.indkey
    FROM published AS t
    JOIN LATERAL (
        SELECT x.indkey FROM pg_index AS x
        WHERE x.indrelid = t.oid AND x.indislive
            AND CASE WHEN t.relreplident = 'i' THEN x.indisreplident ELSE x.indisprimary END
        LIMIT 1
    ) AS i ON true
), base (oid, type, modifier) AS (
    SELECT DISTINCT a.atttypid, a.atttypid, -1
    FROM pg_attribute AS a JOIN published AS t ON t.oid = a.attrelid
    UNION ALL
    SELECT b.oid, y.typbasetype, y.typtypmod
    FROM base AS b JOIN pg_type AS y ON y.oid = b.type AND y.typtype = 'd'
)
SELECT t.oid, t.schemaname AS schema, t.tablename AS table, t.relkind AS kind, t.relreplident AS identity, t.rowfilter,
    a.attname AS name, a.atttypid AS type, a.atttypmod AS modifier,
    b.type AS base_type, CASE WHEN b.type = a.atttypid THEN a.atttypmod ELSE b.modifier END AS base_modifier,
    coalesce(a.attnum = ANY (i.indkey), false) AS key
FROM published AS t
JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
JOIN base AS b ON b.oid = a.atttypid
JOIN pg_type AS y ON y.oid = b.type AND y.typtype <> 'd'
LEFT JOIN identity AS i ON i.oid = t.oid
WHERE coalesce(t.names ? a.attname, true)
    -- Server 15 names generated columns, which none before 18 sends.
    AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 180000)
ORDER BY t.schemaname, t.tablename, a.attnum;

-- name: slot
SELECT current_database() AS here,
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END - '0/0' AS flushed,
    (SELECT count(*) > 0 FROM pg_publication WHERE pubname = :publication) AS published,
    s.plugin, s.slot_type AS type, s.database, s.active_pid AS pid,
    s.restart_lsn - '0/0' AS restart, s.confirmed_flush_lsn - '0/0' AS confirmed,
    s.wal_status, to_jsonb(s) ->> 'invalidation_reason' AS reason
FROM (VALUES (1)) AS one (n)
LEFT JOIN pg_replication_slots AS s ON s.slot_name = :slot;

-- name: advance
SELECT pg_replication_slot_advance(:slot, :upto::pg_lsn);

-- name: others
-- Relations whose rows are of no interest: they are there, and they are not chosen. What is gone may have been chosen.
SELECT c.oid
FROM pg_class AS c
WHERE c.relkind IN ('r', 'p')
    AND (c.relnamespace = to_regnamespace('penstock_snapshots')
        OR (:chosen::oid[] IS NOT NULL AND c.oid >= 16384 AND c.oid <> ALL (:chosen::oid[])));

-- name: commits
-- A transaction's messages have its id; two with one id cannot be in the log of a slot, which holds back the wraparound.
WITH message AS (
    SELECT number, xid, data, get_byte(data, 0) AS kind
    FROM pg_logical_slot_peek_binary_changes(:slot, :upto::pg_lsn, :messages, 'proto_version', '1', 'publication_names', :names)
        WITH ORDINALITY AS p (lsn, xid, data, number)
), counted AS (
    SELECT max(number) AS number,
        string_agg(CASE WHEN kind = 67 THEN data END, NULL) AS ending,
        sum(CASE
            WHEN kind = 84 THEN 1
            WHEN kind NOT IN (73, 68, 85) THEN 0
            WHEN (:others::oid[])[1] IS NOT NULL
                AND ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint = ANY (:others::oid[]::bigint[]) THEN 0
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
    FROM pg_logical_slot_peek_binary_changes(:slot, :upto::pg_lsn, :messages, 'proto_version', '1', 'publication_names', :names)
        WITH ORDINALITY AS p (lsn, xid, data, number)
)
SELECT count(*) AS messages,
    max(number) FILTER (WHERE CASE WHEN kind = 67
        THEN ('x' || encode(substr(data, 3, 8), 'hex'))::bit(64)::bigint <= :after ELSE false END) AS behind,
    max(number) FILTER (WHERE CASE
        WHEN kind = 84 THEN true
        WHEN kind NOT IN (73, 68, 85) THEN false
        WHEN (:others::oid[])[1] IS NULL THEN true
        ELSE ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint <> ALL (:others::oid[]::bigint[])
    END) AS last_change
FROM message;

-- name: messages
SELECT data
FROM pg_logical_slot_peek_binary_changes(:slot, :upto::pg_lsn, NULL, 'proto_version', '1', 'publication_names', :names);

-- name: chosen_messages
SELECT data
FROM pg_logical_slot_peek_binary_changes(:slot, :upto::pg_lsn, NULL, 'proto_version', '1', 'publication_names', :names)
WHERE CASE WHEN get_byte(data, 0) IN (73, 68, 85)
    THEN ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint <> ALL (:others::oid[]::bigint[]) ELSE true END;

-- name: snapshots_there
SELECT to_regclass('penstock_snapshots.slots') IS NOT NULL AS there;

-- name: lock_schema
SELECT pg_advisory_xact_lock(hashtextextended('penstock_snapshots', 0));

-- name: make_schema
CREATE SCHEMA IF NOT EXISTS penstock_snapshots;

-- A role that was there first with the schema, or the table: whoever owns a table can give it a trigger, which runs with the rights of whoever
-- writes to it.
-- name: foreign_owner
WITH RECURSIVE mine (oid) AS (
    SELECT oid FROM pg_roles WHERE rolname IN (current_user, session_user)
    UNION
    SELECT m.roleid FROM pg_auth_members AS m JOIN mine ON m.member = mine.oid
), owned (owner) AS (
    SELECT nspowner FROM pg_namespace WHERE nspname = 'penstock_snapshots'
    UNION
    SELECT relowner FROM pg_class WHERE oid = to_regclass('penstock_snapshots.slots')
)
SELECT r.rolname::text AS owner
FROM owned
JOIN pg_roles AS r ON r.oid = owned.owner
WHERE NOT r.rolsuper
    AND r.oid NOT IN (SELECT mine.oid FROM mine)
    AND r.oid NOT IN (SELECT datdba FROM pg_database WHERE datname = current_database())
LIMIT 1;

-- name: make_slots
CREATE TABLE IF NOT EXISTS penstock_snapshots.slots (
    slot text PRIMARY KEY,
    state text NOT NULL CHECK (state IN ('copying', 'complete', 'read')),
    consistent_point bigint,
    copied_at bigint,
    tables jsonb NOT NULL DEFAULT '[]'
);

-- name: snapshot
SELECT state, consistent_point, copied_at, tables FROM penstock_snapshots.slots WHERE slot = :slot;

-- name: begin_snapshot
INSERT INTO penstock_snapshots.slots (slot, state) VALUES (:slot, 'copying')
ON CONFLICT (slot) DO UPDATE SET state = 'copying', consistent_point = NULL, copied_at = NULL, tables = '[]';

-- name: end_snapshot
UPDATE penstock_snapshots.slots
SET state = 'complete', consistent_point = :point, tables = :tables::jsonb,
    copied_at = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
WHERE slot = :slot;

-- name: snapshot_read
UPDATE penstock_snapshots.slots SET state = 'read', tables = '[]' WHERE slot = :slot;

-- name: drop_slot
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = :slot;

-- name: lock
SELECT pg_advisory_lock(hashtextextended('penstock slot ' || :slot, 0));

-- A client that stops in the middle of a copy is not waited for, and a lock is waited for only so long.
-- name: limit_waiting
SELECT set_config('idle_in_transaction_session_timeout', '10s', false) AS idle, set_config('lock_timeout', :wait, false) AS wait;

-- name: lock_holder
SELECT l.pid
FROM pg_locks AS l, hashtextextended('penstock slot ' || :slot, 0) AS key
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.classid::bigint = (key >> 32) & 4294967295 AND l.objid::bigint = key & 4294967295
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- name: unlock
SELECT pg_advisory_unlock(hashtextextended('penstock slot ' || :slot, 0));
