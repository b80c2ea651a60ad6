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

-- by_ended --
INDEXED BY stoker_jobs_ended

-- likely --

-- surely --

-- name_begins --
j.name >= :begin AND j.name < :beyond

-- last_letters --
substr($, -:letters)

-- claimed --
{start} WHERE id = ({$}) RETURNING id AS job, attempts AS number;
INSERT INTO stoker_attempts {attempt_columns}
VALUES (:attempt, :job, :worker, :number, :gpus, {now}, {lease_now} + :lease)
RETURNING job_id, number, started, {shown_lease}

-- succeed --
{success_of_attempt} RETURNING job_id AS job;
{success_of_job}
WHERE id = :job AND attempt = :attempt AND state = 'running'
RETURNING id

-- positions --
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
SELECT q.position + n FROM stoker_queue q, numbers ORDER BY n

-- positions taken --
UPDATE stoker_queue SET position = position + :count

-- is there a queue --
SELECT count(CASE WHEN type = 'table' AND name = 'stoker_queue' THEN 1 END), count(*)
FROM sqlite_master
