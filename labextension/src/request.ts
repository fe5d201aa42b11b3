/**
 * One call of the server extension, and what it can answer.
 *
 * Rule 1: the connection is always given, never looked up.
 * Rule 2: whatever goes wrong is a `Problem`: a sentence, and what to do next.
 */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

/** Where the server extension answers, under the server's base URL. */
export const API_PATH = 'gpupool';

/** One thing that is wrong. */
export interface IFault {
  reason: string;
  sentence: string;
  advice: string;
  field: string;
}

/** A no, or a failure. */
export class Problem extends Error {
  constructor(
    /** The HTTP status; 0: there was no answer. */
    readonly status: number,
    /** All that is wrong, the first thing first; never empty. */
    readonly faults: readonly IFault[]
  ) {
    super(faults[0]?.sentence ?? '');
  }

  /** The name of the reason, from the API's closed list. */
  get reason(): string {
    return this.faults[0]?.reason ?? '';
  }

  /** What to do next. */
  get advice(): string {
    return this.faults[0]?.advice ?? '';
  }

  /** Make one of whatever was thrown. */
  static of(error: unknown): Problem {
    if (error instanceof Problem) {
      return error;
    }
    const sentence = error instanceof Error ? error.message : String(error);
    return new Problem(0, [{ reason: 'unreachable', sentence, advice: '', field: '' }]);
  }
}

/** What a call can say besides its method and path. */
export interface ICallOptions {
  query?: Record<string, string>;
  body?: unknown;
  headers?: Record<string, string>;
}

/**
 * Call the server extension.
 *
 * @param settings - The connection to the Jupyter server.
 * @param method - The HTTP method.
 * @param path - The parts of the path under `gpupool/`, not yet encoded.
 * @param options - Query, body and headers.
 * @throws Problem - The server says no, or cannot be reached.
 */
export async function call<T>(
  settings: ServerConnection.ISettings,
  method: string,
  path: readonly string[],
  options: ICallOptions = {}
): Promise<T> {
  const where = URLExt.join(settings.baseUrl, API_PATH, ...path.map(encodeURIComponent));
  const url = where + (options.query ? URLExt.objectToQueryString(options.query) : '');
  const init: RequestInit = { method };
  if (options.body !== undefined) {
    init.body = JSON.stringify(options.body);
    init.headers = { 'Content-Type': 'application/json' };
  }
  if (options.headers) {
    init.headers = { ...init.headers, ...options.headers };
  }
  let response: Response;
  try {
    response = await ServerConnection.makeRequest(url, init, settings);
  } catch (error) {
    throw Problem.of(error);
  }
  const text = await response.text();
  if (!response.ok) {
    throw problem(response, text);
  }
  return (text ? JSON.parse(text) : null) as T;
}

/** Read a problem from an answer, whoever has written it. */
function problem(response: Response, text: string): Problem {
  let said: Record<string, unknown> = {};
  try {
    said = JSON.parse(text) as Record<string, unknown>;
  } catch {
    // not one of ours: a proxy's page, say
  }
  if (Array.isArray(said.errors) && said.errors.length) {
    return new Problem(response.status, said.errors as IFault[]);
  }
  const first = (name: string): string => (typeof said[name] === 'string' ? (said[name] as string) : '');
  const sentence =
    first('detail') || first('message') || `The server answered ${response.status} ${response.statusText}.`;
  const fault = { reason: first('reason'), sentence, advice: first('advice'), field: first('field') };
  return new Problem(response.status, [fault]);
}
