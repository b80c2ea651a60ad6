What PostgreSQL says in its own way. Of a CASE it believes that half the rows pass, whatever is in it; of a plain comparison
in a table without statistics, that one in two hundred does, and then it reads and sorts all queued jobs for each claim.

-- now --
CAST(extract(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)

-- each --
(SELECT json_array_elements_text(CAST(:$ AS JSON)))

-- locked --
FOR UPDATE OF $

-- skip_locked --
FOR UPDATE OF $ SKIP LOCKED

-- by_queued --

-- likely --
(CASE WHEN

-- surely --
THEN TRUE ELSE FALSE END)

-- positions --
SELECT CAST(nextval('stoker_positions') AS DOUBLE PRECISION) FROM generate_series(1, :count)

-- announce --
NOTIFY stoker

-- listen --
LISTEN stoker

-- is there a queue --
SELECT count(*) FROM pg_catalog.pg_class WHERE oid = to_regclass('stoker_queue')

-- alone --
SELECT pg_advisory_xact_lock(7528433)
