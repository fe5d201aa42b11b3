// Made by wire_types.py from the OpenAPI description of the pool's HTTP API. Do not edit.

export interface Pool {
  version: string;
  api: number;
  simulated: boolean;
  simulated_note: string;
  trust_users: boolean;
  one_user: string | null;
  nodes: {
    name: string;
    address: string;
    state: 'up' | 'silent' | 'lost';
    connected: boolean;
    cordoned: string;
    retired: boolean;
    cpus: number;
    memory: number;
    devices: number;
    simulated: boolean;
  }[];
  gpus: number;
  gpus_free: number;
  largest_together: number;
  models: Record<string, number>;
  pending: number;
  leases: number;
  user: {
    name: string;
    admin: boolean;
    scopes: string[];
  };
}

export interface Devices {
  devices: {
    uuid: string;
    node: string;
    index: number;
    name: string;
    model: string;
    memory: number;
    mig: boolean;
    profiles: string[];
    verdict: 'fine' | 'watch' | 'restart_worker' | 'retire_soon' | 'evacuate' | 'gone';
    verdict_sentence: string;
    flags: string[];
    cordoned: string;
    outside: string;
    parts: {
      slice: string;
      lease: string;
      lease_name: string;
      user: string;
      milli: number;
      vram: number;
      state: 'starting' | 'running' | 'draining' | 'stopping';
      profile: string;
      start: number | null;
      size: number | null;
    }[];
    free_milli: number;
    reading: {
      utilisation: number | null;
      memory_used: number | null;
      temperature: number | null;
      power: number | null;
      error: string;
      age_s: number;
    } | null;
  }[];
  gone: string[];
  sequence: number;
  simulated: boolean;
}

export interface Evidence {
  device: string;
  name: string;
  verdict: 'fine' | 'watch' | 'restart_worker' | 'retire_soon' | 'evacuate' | 'gone';
  sentence: string;
  probation: boolean;
  cordoned: string;
  evidence: {
    rule?: string;
    since?: number;
    instance?: number;
    programs?: string[];
    incidents?: {
      kind?: string;
      labels?: string[];
      meaning?: string;
      first?: number;
      last?: number;
      count?: number;
      instance?: number;
      programs?: string[];
    }[];
    readings?: {
      now?: number;
      error?: string;
      utilisation?: number | null;
      memory_used?: number | null;
      temperature?: number | null;
      power?: number | null;
      recovery_action?: number | null;
      remap_pending?: boolean | null;
      remap_failed?: boolean | null;
      ecc_uncorrected?: number | null;
      slowdown?: number | null;
      pcie_width?: number | null;
      nvlinks?: boolean[] | null;
      nvlink_errors?: number | null;
    }[];
    error?: string;
    memory_errors?: number[][];
    strikes?: number[];
    probation_until?: number;
  };
}

export interface Lease {
  id: string;
  name: string;
  user: string;
  project: string;
  state: 'pending' | 'starting' | 'active' | 'draining' | 'suspended' | 'ended';
  version: number;
  why: string;
  requested: Record<string, unknown>;
  gpus: number;
  submitted_at: number | null;
  granted_at: number | null;
  started_at: number | null;
  ends_at: number | null;
  ended_at: number | null;
  place: number | null;
  expected_start: number | null;
  reasons: {
    reason: string;
    sentence: string;
    advice: string;
    field: string;
  }[];
  progress: {
    scheduler: boolean;
    workers: number;
    of: number;
  };
  slices: {
    id: string;
    device: string;
    device_name: string;
    node: string;
    model: string;
    milli: number;
    vram: number;
    state: 'starting' | 'running' | 'draining' | 'stopping';
    profile: string;
    limits: {
      layer: 'mig' | 'rmm' | 'torch' | 'cupy' | 'mps' | 'guard';
      state: 'on' | 'ready' | 'failed';
      sentence: string;
    }[];
  }[];
  suspending: boolean;
  sure: number;
  wanted: number;
  surplus: number;
  holds: {
    parts: {
      name: string;
      size: number;
    }[];
    count: number;
    size: number;
  };
  preemptible: boolean;
  interactive: boolean;
  idle_since: number | null;
  idle_timeout: number;
  simulated: boolean;
  shared_with: string[];
  notes: string[];
  warning?: string;
}

export interface Leases {
  leases: Lease[];
  next: string | null;
}

export interface Explanation {
  starts_now: boolean;
  place: number | null;
  expected_start: number | null;
  reasons: {
    reason: string;
    sentence: string;
    advice: string;
    field: string;
  }[];
  sentences: string[];
}

export interface Logs {
  logs: {
    name: string;
    text: string;
  }[];
}

export interface Queue {
  queue: {
    place: number;
    id: string;
    name: string;
    user: string;
    project: string;
    gpus: number;
    submitted_at: number | null;
    expected_start: number | null;
    why: string;
  }[];
}

export interface ProjectsNow {
  projects: {
    name: string;
    parent: string;
    quota: Record<string, number>;
    limit: Record<string, number>;
    weight: number;
    tier: number;
    default_time: number;
    max_time: number;
    held: Record<string, number>;
    gpus: number;
    waiting: number;
    demand: number;
    guaranteed: number;
    deserved: number;
    deserved_by_model: Record<string, number>;
    served: number;
    borrowed: number;
    used: number;
    decayed: number;
    idle: number;
    lost: number;
    charged: number;
    users?: Record<string, unknown>[];
    members?: string[];
  }[];
  defaults: {
    half_life: number;
    grace: number;
    min_run: number;
    time_limit: number;
    max_time: number;
    idle_timeout: number;
    idle_warnings: number;
    idle_warning_gap: number;
    charged_ahead: number;
    model_weights: Record<string, number>;
    reservations: number;
    passing: boolean;
    node_silence: number;
    drain_deadline: number;
    hold: number;
    ageing_step: number;
    ageing_most: number;
  };
}

export interface Usage {
  usage: {
    project: string;
    user: string;
    leases: number;
    quota: Record<string, number>;
    limit: Record<string, number>;
    weight: number;
    tier: number;
    gpus: number;
    waiting: number;
    demand: number;
    guaranteed: number;
    deserved: number;
    deserved_by_model: Record<string, number>;
    served: number;
    borrowed: number;
    used: number;
    decayed: number;
    idle: number;
    lost: number;
    charged: number;
  }[];
  accounts: {
    project: string;
    user: string;
    model: string;
    kind: string;
    used: number;
    decayed: number;
    idle: number;
    lost: number;
  }[];
  reclaims: number;
}

export interface History {
  user: string;
  now: number;
  hours: {
    time: number;
    used: number;
    idle: number;
  }[];
}

export interface Notices {
  notices: {
    seq: number;
    time: number;
    user: string;
    notice: string;
    lease: string;
    sentence: string;
    data: Record<string, unknown>;
  }[];
  next: number;
  missed: boolean;
  leases: number;
}

export interface Request {
  /** Whole GPUs for sure (2), or a share of one (0.5). Default: 1. */
  gpus?: number | string;
  /** How far it may grow while nobody else needs them. */
  max_gpus?: number | string;
  /** How far it may shrink when a GPU fails. */
  min_gpus?: number | string;
  /** A share of a GPU with this much memory ("20GB"). */
  vram?: string | number | number;
  /** A MIG instance of this profile ("1g.10gb"). */
  mig?: string;
  /** With vram: any MIG profile that has so much memory. */
  isolated?: boolean;
  /** Who pays. Default: the person's only project. */
  project?: string;
  /** The GPU's model ("H100-80GB"); "A|B" for either. */
  model?: string;
  /** The least memory that each GPU must have in all. */
  min_vram?: string | number | number;
  /** All on one node. */
  same_node?: boolean;
  /** All linked by NVLink. */
  nvlink?: boolean;
  /** On this node only. */
  node?: string;
  /** Not on these nodes or devices (by UUID). */
  exclude?: string[] | string;
  /** Rather on many nodes than on few. */
  spread?: boolean;
  /** Shares of this lease may sit on one device. */
  same_device?: boolean;
  /** When it ends at the latest: "2h", or seconds. */
  time_limit?: string | number | number;
  /** "2h", seconds, or "never". */
  idle_timeout?: string | number | boolean;
  /** A person waits for it: not taken back within quota. */
  interactive?: boolean;
  /** It may be suspended when others need its GPUs. */
  preemptible?: boolean;
  /** Among one's own requests; higher first. */
  priority?: number | string;
  /** Its name among the person's leases. */
  name?: string;
  /** Host CPUs of each worker. */
  cpus?: number | string;
  /** Host memory of each worker. */
  memory?: string | number | number;
  /** How its processes start; see ENVIRONMENT. */
  environment?: Record<string, unknown>;
  /** dask-cuda's own options, such as rmm_pool_size. */
  options?: Record<string, unknown>;
}

export interface Change {
  /** More time on top of the present limit. */
  extend?: string | number | number;
  /** It is idle, and still needed. */
  keep?: true;
  /** How many GPUs an elastic lease wants at most from now on. */
  gpus?: number | string;
  /** Who else may use it, in place of those who may now. */
  share?: string[] | string;
}

export interface Health {
  action: 'cordon' | 'drain' | 'uncordon' | 'undrain' | 'retire' | 'drill' | 'undrill';
  /** For everybody to read. */
  why?: string;
  /** Of a drain; default: the pool's, to retire a day. */
  deadline?: string | number;
  /** Of a drill; default: 79. */
  xid?: number;
}

export interface Problem {
  type: string;
  title: string;
  status: number;
  detail: string;
  reason: 'bad_request' | 'unknown_project' | 'not_a_member' | 'unknown_model' | 'unknown_profile' | 'unknown_node' | 'unknown_lease' | 'name_taken' | 'too_many_gpus' | 'too_much_memory' | 'too_much_host' | 'contradiction' | 'over_limit' | 'time_limit' | 'quota_sum' | 'not_yours' | 'one_user_only' | 'delays_reservation' | 'lease_over' | 'store_failed' | 'at_limit' | 'behind' | 'no_room' | 'reserved' | 'reclaiming' | 'no_nodes' | 'device_busy' | 'device_held' | 'device_out' | 'device_cordoned' | 'device_outside_use' | 'device_shared' | 'device_whole' | 'wrong_model' | 'too_little_memory' | 'no_cpus' | 'no_host_memory' | 'no_mig' | 'no_mig_room' | 'not_same_node' | 'not_linked' | 'excluded' | 'node_silent' | 'wrong_token' | 'not_allowed' | 'not_found' | 'no_such_method' | 'not_ready' | 'key_reused' | 'needs_restart' | 'cannot_attach' | 'too_large' | 'not_json' | 'too_many_requests' | 'timed_out' | 'broken';
  advice: string;
  field: string;
  errors?: {
    reason: string;
    sentence: string;
    advice: string;
    field: string;
  }[];
}
