What differs in SQLite. Where there are several statements, each has what the one before returned as parameters.

-- now --
((julianday('now') - 2440587.5) * 86400.0)

-- lease_now --
:lease_now

-- shown_lease --
lease_expires + round({now} - {lease_now})

-- shown_wake --
CASE WHEN j.not_before > 0 THEN j.not_before + round({now} - {lease_now}) ELSE 0 END

-- read clock --
SELECT ahead FROM stoker_clocks WHERE boot = :boot

-- write clock --
INSERT INTO stoker_clocks (boot, ahead) VALUES (:boot, :ahead) ON CONFLICT (boot) DO NOTHING

-- among --
IN (SELECT value FROM json_each(:$))

-- locked --

-- skip_locked --

-- queued --
j.state = 'queued'

-- by_queued --
INDEXED BY stoker_jobs_queued

-- ready --
$.state = 'queued' AND $.blocked = 0 AND $.not_before = 0 AND $.kept_by IS NULL

-- by_ready --
INDEXED BY stoker_jobs_ready

-- by_kept --
INDEXED BY stoker_jobs_kept_order

-- by_later --
INDEXED BY stoker_jobs_later

-- unended --
$.outcome IS NULL

-- by_lease --
INDEXED BY stoker_attempts_running

-- by_ended --
INDEXED BY stoker_jobs_ended

-- heads_of --
$ s CROSS JOIN stoker_jobs j ON j.rowid IN (
  SELECT h.rowid FROM stoker_jobs h INDEXED BY stoker_jobs_ready WHERE {ready h} AND h.shape = s.shape
  ORDER BY h.priority DESC, h.position, h.submitted, h.id LIMIT 16
)

-- newest_alike --
$ w CROSS JOIN (SELECT rowid AS number, ended - started AS seconds FROM stoker_jobs) ended_alike ON ended_alike.number IN (
  SELECT h.rowid FROM stoker_jobs h INDEXED BY stoker_jobs_pattern
  WHERE h.state = 'succeeded' AND h.pattern <> '' AND h.pattern = w.pattern ORDER BY h.ended DESC LIMIT 15
)

-- each --
value FROM json_each(:$)

-- yes --
1

-- no --
0

-- last_letters --
substr($, -:letters)

-- claimed --
{start} WHERE id = ({$}) RETURNING id AS job, attempts AS number, started AS job_started;
{new_attempt};
SELECT {job}, :number, :began, :expires FROM stoker_jobs j WHERE j.id = :job

-- new_attempt --
INSERT INTO stoker_attempts {attempt_columns}
VALUES (:attempt, :job, :worker, :number, :gpus, coalesce(:job_started, {now}), {lease_now} + :lease, :pending)
RETURNING started AS began, {shown_lease} AS expires

-- rung --
''

-- not_synced --
NULL

-- succeed --
{success_of_attempt} RETURNING job_id AS finished;
{success_of_job}
WHERE id = :finished AND attempt = :ended AND {is_running}
RETURNING id AS finished, (EXISTS (SELECT 1 FROM stoker_dependencies d WHERE d.needs = id) OR length(shape) > 16) AS is_needed, {rung}

-- succeed and claim --
{succeed};
{start} WHERE :is_needed = 0 AND id = ({head}) RETURNING id AS job, attempts AS number, started AS job_started;
{new_attempt};
SELECT :finished, :is_needed, {rung}, {job}, :number, :began, :expires FROM stoker_jobs j WHERE j.id = :job

-- positions --
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
SELECT q.position + n FROM stoker_queue q, numbers ORDER BY n

-- positions taken --
UPDATE stoker_queue SET position = position + :count

-- is there a queue --
SELECT count(CASE WHEN type = 'table' AND name = 'stoker_queue' THEN 1 END), count(*)
FROM sqlite_master

-- insert text --
INSERT INTO stoker_texts (job_id, name, command, marks, owner) VALUES (:job, :name, :command, :marks, :owner)

-- change text --
UPDATE stoker_texts SET name = :name, command = :command, marks = :marks, owner = :owner WHERE job_id = :job

-- place_in --
instr

-- seq --
g.rowid

-- job_of_text --
CROSS JOIN stoker_jobs j

-- text_of_job --
CROSS JOIN stoker_texts t

-- found by text --
stoker_trigrams(:words) g CROSS JOIN stoker_texts t ON t.seq = g.rowid CROSS JOIN stoker_jobs j ON j.id = t.job_id

-- sort by name --
CASE WHEN j.name = '' THEN '~~~' ELSE lower(j.name) END

-- sort by gpus --
json_extract(j.spec, '$.gpus') * json_extract(j.spec, '$.nodes')
