What SQLite says in its own way.

-- now --
((julianday('now') - 2440587.5) * 86400.0)

-- each --
(SELECT value FROM json_each(:$))

-- locked --

-- skip_locked --

-- by_queued --
INDEXED BY stoker_jobs_queued

-- likely --

-- surely --

-- positions --
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
SELECT q.position + n FROM stoker_queue q, numbers ORDER BY n

-- positions taken --
UPDATE stoker_queue SET position = position + :count

-- is there a queue --
SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'stoker_queue'

-- is there anything --
SELECT count(*) FROM sqlite_master
