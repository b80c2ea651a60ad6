What differs in PostgreSQL. Its planner assumes that half the rows pass a CASE. For a plain comparison it uses its statistics,
which may be an hour old: for a queue that was filled since then it would read and sort all jobs for each claim.

-- now --
CAST(extract(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)

-- lease_now --
{now}

-- shown_lease --
lease_expires

-- shown_wake --
j.not_before

-- among --
= ANY (ARRAY(SELECT json_array_elements_text(CAST(:$ AS JSON))))

-- locked --
FOR UPDATE OF $

-- skip_locked --
FOR UPDATE OF $ SKIP LOCKED

-- queued --
(CASE WHEN j.state = 'queued' THEN TRUE ELSE FALSE END)

-- by_queued --

-- by_ended --

-- likely --
(CASE WHEN

-- surely --
THEN TRUE ELSE FALSE END)

-- name_begins --
j.name ~>=~ :begin AND j.name ~<~ :beyond

-- last_letters --
right($, :letters)

-- claimed --
WITH started AS ({start} WHERE id = ({$}) RETURNING id, attempts)
INSERT INTO stoker_attempts {attempt_columns}
SELECT :attempt, s.id, :worker, s.attempts, :gpus, {now}, {lease_now} + :lease FROM started s
RETURNING job_id, number, started, lease_expires

-- succeed --
WITH ended AS ({success_of_attempt} RETURNING job_id)
{success_of_job}
FROM ended WHERE id = ended.job_id AND attempt = :attempt AND state = 'running'
RETURNING id, CASE WHEN :ring = 1 THEN CAST(pg_notify('stoker', '') AS TEXT) END

-- positions --
SELECT CAST(nextval('stoker_positions') AS DOUBLE PRECISION) FROM generate_series(1, :count)

-- notify --
NOTIFY stoker

-- listen --
LISTEN stoker

-- is there a queue --
SELECT count(*) FROM pg_catalog.pg_class WHERE oid = to_regclass('stoker_queue')

-- alone --
SELECT pg_advisory_xact_lock(7528433)
