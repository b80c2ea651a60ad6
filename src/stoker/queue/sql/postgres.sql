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

-- ready --
(CASE WHEN $.state = 'queued' AND $.blocked = 0 AND $.not_before = 0 AND $.kept_by IS NULL THEN TRUE ELSE FALSE END)

-- by_ready --

-- by_kept --

-- by_later --

-- unended --
(CASE WHEN $.outcome IS NULL THEN TRUE ELSE FALSE END)

-- by_lease --

-- by_ended --

-- heads_of --
$ s CROSS JOIN LATERAL (
  SELECT j.shape, j.id, j.priority, j.position, j.submitted FROM stoker_jobs j
  WHERE {ready j} AND j.shape = s.shape {in_order} LIMIT 16
) AS j

-- newest_alike --
$ w CROSS JOIN LATERAL (
  SELECT j.ended - j.started AS seconds FROM stoker_jobs j
  WHERE j.state = 'succeeded' AND j.pattern <> '' AND j.pattern = w.pattern ORDER BY j.ended DESC LIMIT 15
) AS ended_alike

-- each --
json_array_elements_text(CAST(:$ AS JSON))

-- yes --
TRUE

-- no --
FALSE

-- last_letters --
right($, :letters)

-- claimed --
WITH started AS ({start} WHERE id = ({$}) RETURNING *), claimed AS ({new_attempt} FROM started RETURNING *)
SELECT {job}, c.number, c.started, c.lease_expires FROM started j CROSS JOIN claimed c

-- new_attempt --
INSERT INTO stoker_attempts {attempt_columns}
SELECT :attempt, started.id, :worker, started.attempts, :gpus, {now}, {lease_now} + :lease, :pending

-- ended_with --
WITH ended AS ({success_of_attempt} RETURNING job_id), done AS (
  {success_of_job} FROM ended WHERE id = ended.job_id AND attempt = :ended AND {is_running}
  RETURNING id, (EXISTS (SELECT 1 FROM stoker_dependencies d WHERE d.needs = id) OR length(shape) > 16) AS is_needed
)

-- milliseconds --
CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)

-- people_were_notified --
({milliseconds} - (SELECT last_value FROM stoker_notified) BETWEEN 0 AND 199)

-- notify_people --
CAST(setval('stoker_notified', {milliseconds}) AS TEXT) || CAST(pg_notify('stoker', '') AS TEXT)

-- rung --
CASE WHEN :ring = 1 AND NOT {people_were_notified} THEN {notify_people} END

-- not_synced --
set_config('synchronous_commit', 'off', TRUE)

-- succeed --
{ended_with} SELECT id, is_needed, {rung} FROM done

-- succeed and claim --
{ended_with}, started AS ({start} WHERE id = (SELECT chosen.id FROM ({head}) AS chosen, done WHERE NOT done.is_needed) RETURNING *),
claimed AS ({new_attempt} FROM started RETURNING *)
SELECT d.id, d.is_needed, {rung}, {job}, c.number, c.started, c.lease_expires
FROM done d LEFT JOIN started j ON TRUE LEFT JOIN claimed c ON TRUE

-- positions --
SELECT CAST(nextval('stoker_positions') AS DOUBLE PRECISION) FROM generate_series(1, :count)

-- notify --
SELECT CASE WHEN :limited = 0 OR :concerns_workers = 1 OR NOT {people_were_notified} THEN {notify_people} END,
  CASE WHEN :concerns_workers = 1 THEN CAST(nextval('stoker_changes') AS TEXT) || CAST(pg_notify('stoker_workers', :changes) AS TEXT) END

-- changes --
SELECT last_value FROM stoker_changes

-- listen --
LISTEN stoker

-- listen as worker --
LISTEN stoker_workers; SET enable_seqscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan

-- is there a queue --
SELECT count(*) FROM pg_catalog.pg_class WHERE oid = to_regclass('stoker_queue')

-- alone --
SELECT pg_advisory_xact_lock(7528433)

-- insert text --
INSERT INTO stoker_texts (job_id, name, command, marks, owner, grams)
VALUES (:job, :name, :command, :marks, :owner, CAST(:grams AS INTEGER[]))

-- change text --
UPDATE stoker_texts SET name = :name, command = :command, marks = :marks, owner = :owner, grams = CAST(:grams AS INTEGER[])
WHERE job_id = :job

-- place_in --
strpos

-- seq --
t.seq

-- job_of_text --
CROSS JOIN LATERAL (SELECT * FROM stoker_jobs WHERE id = t.job_id OFFSET 0) j

-- text_of_job --
CROSS JOIN LATERAL (SELECT * FROM stoker_texts WHERE job_id = j.id OFFSET 0) t

-- found by text --
(SELECT * FROM stoker_texts WHERE grams @> CAST(:grams AS INTEGER[]) OFFSET 0) t {job_of_text}

-- sort by name --
CASE WHEN j.name = '' THEN '~~~' ELSE lower(j.name) END COLLATE "C"

-- sort by gpus --
CAST(CAST(j.spec AS JSON) ->> 'gpus' AS INTEGER) * CAST(CAST(j.spec AS JSON) ->> 'nodes' AS INTEGER)
