-- The tables of a queue in PostgreSQL. A change of them is a new `VERSION` in driver.py.

CREATE TABLE stoker_queue (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  version INTEGER NOT NULL,
  paused INTEGER NOT NULL
);
INSERT INTO stoker_queue VALUES (1, 1, 0);

CREATE SEQUENCE stoker_positions;

-- How often workers were notified: what those ask who reach the database through a pooler, and cannot listen.
CREATE SEQUENCE stoker_changes;

-- When people were notified last, in milliseconds. Each notification wakes every process of the server that listens to
-- anything: jobs that end all over a large fleet must not send more than a few in a second.
CREATE SEQUENCE stoker_notified;

CREATE TABLE stoker_jobs (
  id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  origin TEXT COLLATE "C" UNIQUE,
  name TEXT NOT NULL,
  group_name TEXT COLLATE "C" NOT NULL DEFAULT '',
  state TEXT NOT NULL,
  priority INTEGER NOT NULL,
  position DOUBLE PRECISION NOT NULL,
  retries INTEGER NOT NULL,
  retries_left INTEGER NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  attempt TEXT,
  submitted DOUBLE PRECISION NOT NULL,
  started DOUBLE PRECISION,
  ended DOUBLE PRECISION,
  not_before DOUBLE PRECISION NOT NULL DEFAULT 0,
  cancel_requested DOUBLE PRECISION,
  exit_code INTEGER,
  reason TEXT NOT NULL DEFAULT '',
  link TEXT NOT NULL DEFAULT '',
  notify TEXT NOT NULL DEFAULT '',
  kept_by TEXT,
  kept_gpus TEXT,
  kept_until DOUBLE PRECISION,
  shape TEXT COLLATE "C" NOT NULL,
  blocked INTEGER NOT NULL DEFAULT 0,
  pattern TEXT COLLATE "C" NOT NULL DEFAULT '',
  spec TEXT NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX stoker_jobs_queued ON stoker_jobs (priority DESC, position, submitted, id)
  WHERE (CASE WHEN state = 'queued' THEN TRUE ELSE FALSE END);
CREATE INDEX stoker_jobs_ready ON stoker_jobs (shape, priority DESC, position, submitted, id)
  WHERE (CASE WHEN state = 'queued' AND blocked = 0 AND not_before = 0 AND kept_by IS NULL THEN TRUE ELSE FALSE END);
CREATE INDEX stoker_jobs_later ON stoker_jobs (not_before) WHERE state = 'queued' AND not_before > 0;
CREATE INDEX stoker_jobs_submitted ON stoker_jobs (submitted, position);
CREATE INDEX stoker_jobs_state ON stoker_jobs (state, submitted, position);
CREATE INDEX stoker_jobs_name ON stoker_jobs (name text_pattern_ops) WHERE name <> '';

-- Jobs with entries of `--notify`; those for the end of a group are in the group.
CREATE INDEX stoker_jobs_notify ON stoker_jobs (ended) WHERE notify <> '';

CREATE INDEX stoker_jobs_group ON stoker_jobs (group_name, state) WHERE group_name <> '';

-- `key` is the end of the shapes of its jobs while `at_most` of them may run at once.
CREATE TABLE stoker_groups (
  name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  key TEXT COLLATE "C" NOT NULL UNIQUE,
  at_most INTEGER,
  notify TEXT NOT NULL DEFAULT '',
  submitted DOUBLE PRECISION NOT NULL
);
CREATE INDEX stoker_groups_submitted ON stoker_groups (submitted);
CREATE INDEX stoker_groups_notify ON stoker_groups (name) WHERE notify <> '';

CREATE TABLE stoker_dependencies (
  job_id TEXT COLLATE "C" NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  needs TEXT COLLATE "C" NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  kind TEXT NOT NULL,
  PRIMARY KEY (job_id, needs, kind)
);
CREATE INDEX stoker_dependencies_needs ON stoker_dependencies (needs);

CREATE TABLE stoker_tags (
  tag TEXT NOT NULL,
  job_id TEXT COLLATE "C" NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  PRIMARY KEY (tag, job_id)
);
CREATE INDEX stoker_tags_job ON stoker_tags (job_id);

-- What jobs are searched by, and the numbers of its trigrams.
CREATE TABLE stoker_texts (
  seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_id TEXT COLLATE "C" NOT NULL UNIQUE REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  name TEXT NOT NULL,
  command TEXT NOT NULL,
  marks TEXT NOT NULL,
  owner TEXT NOT NULL,
  grams INTEGER[] NOT NULL
);
CREATE INDEX stoker_texts_grams ON stoker_texts USING gin (grams);

CREATE TABLE stoker_attempts (
  id TEXT NOT NULL PRIMARY KEY,
  job_id TEXT COLLATE "C" NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  worker_id TEXT NOT NULL,
  number INTEGER NOT NULL,
  gpus TEXT NOT NULL,
  started DOUBLE PRECISION NOT NULL,
  lease_expires DOUBLE PRECISION NOT NULL,
  ended DOUBLE PRECISION,
  outcome TEXT,
  exit_code INTEGER,
  reason TEXT NOT NULL DEFAULT '',
  pending INTEGER NOT NULL DEFAULT 0,
  location TEXT NOT NULL DEFAULT '',
  UNIQUE (job_id, number)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX stoker_attempts_running ON stoker_attempts (lease_expires)
  WHERE (CASE WHEN outcome IS NULL THEN TRUE ELSE FALSE END);
CREATE INDEX stoker_attempts_worker ON stoker_attempts (worker_id, started);
CREATE UNIQUE INDEX stoker_attempts_one ON stoker_attempts (job_id) WHERE outcome IS NULL;

CREATE TABLE stoker_logs (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  tail TEXT NOT NULL,
  is_last INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE stoker_workers (
  id TEXT NOT NULL PRIMARY KEY,
  host TEXT NOT NULL,
  view TEXT NOT NULL,
  started DOUBLE PRECISION NOT NULL,
  seen DOUBLE PRECISION NOT NULL,
  paused INTEGER NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE stoker_forgotten (
  origin TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  job_id TEXT NOT NULL
);

-- What similar jobs took.
CREATE INDEX stoker_jobs_pattern ON stoker_jobs (pattern, ended) WHERE state = 'succeeded' AND pattern <> '';
CREATE INDEX stoker_jobs_ended ON stoker_jobs (ended, state) WHERE ended IS NOT NULL;

CREATE TABLE stoker_attempt_details (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  cause TEXT NOT NULL,
  rule TEXT NOT NULL,
  report TEXT NOT NULL,
  fit TEXT NOT NULL,
  written DOUBLE PRECISION NOT NULL
);
CREATE INDEX stoker_attempt_details_rule ON stoker_attempt_details (written) WHERE rule <> '';

CREATE TABLE stoker_snoozes (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  until DOUBLE PRECISION NOT NULL,
  who TEXT NOT NULL
);
CREATE INDEX stoker_snoozes_until ON stoker_snoozes (until);

CREATE TABLE stoker_usage (
  host TEXT COLLATE "C" NOT NULL,
  gpu TEXT COLLATE "C" NOT NULL,
  minute INTEGER NOT NULL,
  job DOUBLE PRECISION NOT NULL,
  background DOUBLE PRECISION NOT NULL,
  somebody DOUBLE PRECISION NOT NULL,
  free DOUBLE PRECISION NOT NULL,
  unknown DOUBLE PRECISION NOT NULL,
  utilization DOUBLE PRECISION,
  memory BIGINT,
  power DOUBLE PRECISION,
  PRIMARY KEY (host, gpu, minute)
) WITH (fillfactor = 70);
CREATE INDEX stoker_usage_minute ON stoker_usage (minute);

CREATE TABLE stoker_notices (
  name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  sent DOUBLE PRECISION NOT NULL
);

-- The URLs that were added on the page, each with the events that are sent to it.
CREATE TABLE stoker_notify_urls (
  id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  url TEXT NOT NULL UNIQUE,
  name TEXT NOT NULL,
  events TEXT NOT NULL,
  added DOUBLE PRECISION NOT NULL
);

CREATE TABLE stoker_log_streams (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  until DOUBLE PRECISION NOT NULL,
  edition TEXT NOT NULL DEFAULT '',
  size BIGINT NOT NULL DEFAULT 0,
  unfinished BYTEA,
  behind INTEGER NOT NULL DEFAULT 0,
  complete INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE stoker_log_chunks (
  attempt_id TEXT NOT NULL REFERENCES stoker_log_streams (attempt_id) ON DELETE CASCADE,
  edition TEXT NOT NULL,
  start BIGINT NOT NULL,
  data BYTEA NOT NULL,
  PRIMARY KEY (attempt_id, edition, start)
);

CREATE INDEX stoker_jobs_kept ON stoker_jobs (kept_by) WHERE kept_by IS NOT NULL;
CREATE INDEX stoker_jobs_kept_order ON stoker_jobs (priority DESC, position, submitted, id) WHERE kept_by IS NOT NULL;

-- Jobs that must start by a deadline, by the clock of leases, or that recur; until that is done with.
CREATE TABLE stoker_schedule (
  job_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  deadline DOUBLE PRECISION,
  recurs INTEGER NOT NULL
);
CREATE INDEX stoker_schedule_deadline ON stoker_schedule (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX stoker_schedule_recurs ON stoker_schedule (job_id) WHERE recurs = 1;

CREATE TABLE stoker_feeds (
  name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  version INTEGER NOT NULL,
  memory TEXT NOT NULL
);

CREATE TABLE stoker_blobs (
  digest TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  size BIGINT NOT NULL
);

CREATE TABLE stoker_blob_chunks (
  digest TEXT COLLATE "C" NOT NULL REFERENCES stoker_blobs (digest) ON DELETE CASCADE,
  number INTEGER NOT NULL,
  data BYTEA NOT NULL,
  PRIMARY KEY (digest, number)
);
-- Compressed already.
ALTER TABLE stoker_blob_chunks ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE stoker_blob_uses (
  job_id TEXT COLLATE "C" NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  digest TEXT COLLATE "C" NOT NULL REFERENCES stoker_blobs (digest),
  PRIMARY KEY (job_id, digest)
);
CREATE INDEX stoker_blob_uses_digest ON stoker_blob_uses (digest);

-- `blocked` follows the states of the jobs that a job comes after. Two of them may end at the same time: the row of the
-- job that waits is locked before their states are read, and every statement of a function sees what is committed by then.
CREATE FUNCTION stoker_block(jobs TEXT[]) RETURNS VOID LANGUAGE plpgsql AS $$
  BEGIN
    PERFORM 1 FROM stoker_jobs j WHERE j.id = ANY (jobs) ORDER BY j.id FOR NO KEY UPDATE;
    UPDATE stoker_jobs j SET blocked = CASE WHEN {fulfilled j} THEN 0 ELSE 1 END
    WHERE j.id = ANY (jobs) AND j.blocked <> CASE WHEN {fulfilled j} THEN 0 ELSE 1 END;
  END $$;

CREATE FUNCTION stoker_block_dependents() RETURNS TRIGGER LANGUAGE plpgsql AS $$
  DECLARE dependents TEXT[];
  BEGIN
    SELECT array_agg(d.job_id) INTO dependents FROM stoker_dependencies d WHERE d.needs = NEW.id;
    IF dependents IS NOT NULL THEN PERFORM stoker_block(dependents); END IF;
    RETURN NULL;
  END $$;
CREATE TRIGGER stoker_jobs_block AFTER UPDATE OF state ON stoker_jobs FOR EACH ROW
  WHEN (OLD.state <> NEW.state AND (OLD.state IN {ended_states} OR NEW.state IN {ended_states}))
  EXECUTE FUNCTION stoker_block_dependents();

-- A job that ends at this moment must either be seen here as ended, or see this dependency.
CREATE FUNCTION stoker_block_new() RETURNS TRIGGER LANGUAGE plpgsql AS $$
  BEGIN
    PERFORM 1 FROM stoker_jobs n WHERE n.id = NEW.needs FOR SHARE;
    PERFORM stoker_block(ARRAY[NEW.job_id]);
    RETURN NULL;
  END $$;
CREATE TRIGGER stoker_dependencies_new AFTER INSERT ON stoker_dependencies FOR EACH ROW
  EXECUTE FUNCTION stoker_block_new();

CREATE FUNCTION stoker_block_less() RETURNS TRIGGER LANGUAGE plpgsql AS $$
  BEGIN
    PERFORM stoker_block(ARRAY[OLD.job_id]);
    RETURN NULL;
  END $$;
CREATE TRIGGER stoker_dependencies_less AFTER DELETE ON stoker_dependencies FOR EACH ROW
  EXECUTE FUNCTION stoker_block_less();

-- No path into `running` exceeds the cap of a group: a claim that would finds no job. The row of the group is locked first,
-- so that the count is of what is committed, and nobody else adds to it.
CREATE FUNCTION stoker_within_cap() RETURNS TRIGGER LANGUAGE plpgsql AS $$
  BEGIN
    PERFORM 1 FROM stoker_groups g WHERE g.name = NEW.group_name FOR NO KEY UPDATE;
    IF {full NEW.shape} THEN RETURN NULL; END IF;
    RETURN NEW;
  END $$;
CREATE TRIGGER stoker_jobs_cap BEFORE UPDATE OF state ON stoker_jobs FOR EACH ROW
  WHEN (NEW.state = 'running' AND OLD.state <> 'running' AND length(NEW.shape) > 16)
  EXECUTE FUNCTION stoker_within_cap();
