-- The tables of a queue in PostgreSQL. A change of them is a new `VERSION` in driver.py.

CREATE TABLE stoker_queue (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  version INTEGER NOT NULL,
  paused INTEGER NOT NULL
);
INSERT INTO stoker_queue VALUES (1, 1, 0);

CREATE SEQUENCE stoker_positions;

CREATE TABLE stoker_jobs (
  id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  origin TEXT COLLATE "C" UNIQUE,
  name TEXT NOT NULL,
  state TEXT NOT NULL,
  priority INTEGER NOT NULL,
  position DOUBLE PRECISION NOT NULL,
  gpus INTEGER NOT NULL,
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
  kept_by TEXT,
  kept_gpus TEXT,
  kept_until DOUBLE PRECISION,
  spec TEXT NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX stoker_jobs_queued ON stoker_jobs (priority DESC, position, submitted, id)
  WHERE (CASE WHEN state = 'queued' THEN TRUE ELSE FALSE END);
CREATE INDEX stoker_jobs_later ON stoker_jobs (not_before) WHERE state = 'queued' AND not_before > 0;
CREATE INDEX stoker_jobs_submitted ON stoker_jobs (submitted, position);
CREATE INDEX stoker_jobs_state ON stoker_jobs (state, submitted, position);
CREATE INDEX stoker_jobs_name ON stoker_jobs (name text_pattern_ops) WHERE name <> '';

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
  UNIQUE (job_id, number)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX stoker_attempts_running ON stoker_attempts (lease_expires) WHERE outcome IS NULL;
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
);

CREATE TABLE stoker_forgotten (
  origin TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  job_id TEXT NOT NULL
);

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
  PRIMARY KEY (host, gpu, minute)
) WITH (fillfactor = 70);
CREATE INDEX stoker_usage_minute ON stoker_usage (minute);

CREATE TABLE stoker_notices (
  name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  sent DOUBLE PRECISION NOT NULL
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

CREATE TABLE stoker_feeds (
  name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  version INTEGER NOT NULL,
  memory TEXT NOT NULL
);
