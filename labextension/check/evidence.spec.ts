/**
 * What a verdict rests on, in the words of the Health panel.
 */

import { nullTranslator } from '@jupyterlab/translation';

import { columns, facts, incidentWords } from '../src/evidence';
import type { Evidence, Sample } from '../src/types';

const trans = nullTranslator.load('');
const NOW = new Date(2026, 0, 2, 12).getTime() / 1000;
const AT = NOW * 1000;

function evidence(more: Partial<Evidence> = {}): Evidence {
  return {
    device: 'GPU-1',
    name: 'node-1/gpu0',
    verdict: 'gone',
    sentence: '',
    probation: false,
    cordoned: '',
    evidence: {},
    ...more
  };
}

/** The text of a column for a reading. */
function text(id: string, sample: Sample): string | null {
  return columns(trans, NOW)
    .find(each => each.id === id)!
    .text(sample);
}

describe('facts', () => {
  it('has no row for what is not known', () => expect(facts(evidence(), trans, NOW)).toEqual([]));

  it('names the rule with its time, to the second', () => {
    const found = facts(evidence({ evidence: { rule: 'xid gone', since: AT + 7000 } }), trans, NOW);
    expect(found).toEqual([['Rule', expect.stringMatching(/^“xid gone”, since .*00.07/)]]);
    expect(facts(evidence({ evidence: { rule: 'fine', since: 0 } }), trans, NOW)).toEqual([
      ['Rule', '“fine”']
    ]);
  });

  it('tells when it was taken out, and until when it is on probation only while it is', () => {
    const grounds = { strikes: [AT, AT + 1000], probation_until: AT + 5000 };
    const names = (probation: boolean): string[] =>
      facts(evidence({ probation, evidence: grounds }), trans, NOW).map(each => each[0]);
    expect(names(true)).toEqual(['Taken out within a week', 'On probation until']);
    expect(names(false)).toEqual(['Taken out within a week']);
  });
});

describe('incidentWords', () => {
  it('says what came, when and once', () => {
    const said = { labels: ['XID 79'], meaning: 'fallen off the bus', first: AT, last: AT, count: 1 };
    expect(incidentWords({ ...said, instance: -1, programs: [] }, trans, NOW)).toMatch(
      /^XID 79 \(fallen off the bus\): once, at [^,]*$/
    );
  });

  it('says how often, on which instance, and whose programs were there', () => {
    const said = { labels: ['XID 13', 'XID 43'], meaning: 'an exception', first: AT, last: AT + 1000 };
    const found = incidentWords({ ...said, count: 3, instance: 2, programs: ['ann', 'ben'] }, trans, NOW);
    expect(found).toMatch(/^XID 13, XID 43 \(an exception\): 3 times, from .* to .*/);
    expect(found).toMatch(/, on the MIG instance 2, under programs of ann, ben$/);
  });

  it('gets along with what an agent of another version leaves out', () =>
    expect(incidentWords({}, trans, NOW)).toContain('(?)'));
});

describe('columns', () => {
  it.each([
    ['temperature', { temperature: 0 }, '0 °C'],
    ['temperature', {}, null],
    ['temperature', { temperature: null }, null],
    ['ecc', { ecc_uncorrected: 0 }, '0'],
    ['pending', { remap_pending: false }, 'no'],
    ['failed', { remap_failed: true }, 'yes'],
    ['recovery', { recovery_action: 0 }, 'none'],
    ['recovery', { recovery_action: 1 }, 'reset the GPU'],
    ['recovery', { recovery_action: 99 }, 'action 99'],
    ['slowdown', { slowdown: 0 }, 'none'],
    ['slowdown', { slowdown: 0x1 | 0x4 }, 'none'],
    ['slowdown', { slowdown: 0x8 | 0x40 | 0x80 }, 'hardware, heat, power brake'],
    ['links', { nvlinks: [true, false, true] }, '2 of 3'],
    ['links', { nvlinks: null }, null],
    ['error', { error: 'GPU_IS_LOST' }, 'GPU_IS_LOST'],
    ['error', { error: '' }, null],
    ['power', { power: 61_499 }, '61 W'],
    ['now', {}, null]
  ] as const)('%s of %j is %j', (id, sample, words) =>
    expect(text(id, sample as unknown as Sample)).toBe(words)
  );
});
