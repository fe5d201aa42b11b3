/**
 * The fields of a form: each with its label, and with what is wrong with it.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { FLAGS, IDraft } from './draft';
import type { IFault } from './request';

/** What every field gets. */
export interface IFieldProps {
  draft: IDraft;
  set: (change: Partial<IDraft>) => void;
  faults: readonly IFault[];
  trans: TranslationBundle;
}

type TextName = Exclude<keyof IDraft, 'kind' | (typeof FLAGS)[number]>;

/** A field's label, and what is wrong with it. */
function Labelled(props: {
  name: string;
  label: string;
  faults: readonly IFault[];
  children: (id: string, wrong: boolean) => JSX.Element;
}): JSX.Element {
  const id = `jp-gpupool-field-${props.name}`;
  const own = props.faults.filter(fault => fault.field === props.name);
  return (
    <div className="jp-gpupool-Field">
      <label htmlFor={id}>{props.label}</label>
      {props.children(id, own.length > 0)}
      {own.length > 0 && (
        <p id={`${id}-fault`} className="jp-gpupool-Field-fault">
          {own.map(fault => `✕ ${fault.sentence} ${fault.advice}`).join(' ')}
        </p>
      )}
    </div>
  );
}

/** A field for a line of text, or a number. */
export function Text(
  props: IFieldProps & {
    name: TextName;
    label: string;
    hint?: string;
    type?: string;
    list?: string[];
  }
): JSX.Element {
  const { name, draft, set, list } = props;
  return (
    <Labelled {...props}>
      {(id, wrong) => (
        <>
          <input
            id={id}
            className="jp-mod-styled"
            type={props.type ?? 'text'}
            min={props.type === 'number' && name !== 'priority' ? 1 : undefined}
            value={draft[name]}
            placeholder={props.hint}
            list={list?.length ? `${id}-list` : undefined}
            aria-invalid={wrong}
            aria-describedby={wrong ? `${id}-fault` : undefined}
            onChange={event => set({ [name]: event.target.value })}
          />
          {list && list.length > 0 && (
            <datalist id={`${id}-list`}>
              {list.map(each => (
                <option key={each} value={each} />
              ))}
            </datalist>
          )}
        </>
      )}
    </Labelled>
  );
}

/** A field for several lines of text. */
export function Lines(props: IFieldProps & { name: TextName; label: string; hint: string }): JSX.Element {
  const { name, draft, set } = props;
  return (
    <Labelled {...props}>
      {(id, wrong) => (
        <textarea
          id={id}
          className="jp-mod-styled"
          rows={Math.max(2, draft[name].split('\n').length)}
          value={draft[name]}
          placeholder={props.hint}
          spellCheck={false}
          aria-invalid={wrong}
          aria-describedby={wrong ? `${id}-fault` : undefined}
          onChange={event => set({ [name]: event.target.value })}
        />
      )}
    </Labelled>
  );
}

/** A field for one of several values. */
export function Choice(
  props: IFieldProps & { name: TextName; label: string; values: string[]; none?: string }
): JSX.Element {
  const { name, draft, set, values, trans } = props;
  return (
    <Labelled {...props}>
      {(id, wrong) => (
        <select
          id={id}
          className="jp-mod-styled"
          value={draft[name]}
          aria-invalid={wrong}
          aria-describedby={wrong ? `${id}-fault` : undefined}
          onChange={event => set({ [name]: event.target.value })}
        >
          <option value="">{props.none ?? trans.__('any')}</option>
          {values.map(each => (
            <option key={each}>{each}</option>
          ))}
        </select>
      )}
    </Labelled>
  );
}

/** A field for a yes or no. */
export function Check(props: IFieldProps & { name: (typeof FLAGS)[number]; label: string }): JSX.Element {
  const { name, draft, set, faults } = props;
  const own = faults.filter(fault => fault.field === name);
  return (
    <div className="jp-gpupool-Check">
      <label>
        <input
          type="checkbox"
          checked={draft[name]}
          onChange={event => set({ [name]: event.target.checked })}
        />
        {props.label}
      </label>
      {own.map((fault, n) => (
        <p key={n} className="jp-gpupool-Field-fault">{`✕ ${fault.sentence} ${fault.advice}`}</p>
      ))}
    </div>
  );
}

/** Fields that are folded away until they are asked for, or one of them is wrong. */
export function Fold(
  props: IFieldProps & { label: string; names: readonly string[]; children: React.ReactNode }
): JSX.Element {
  const [open, setOpen] = React.useState(false);
  const wrong = props.faults.some(fault => props.names.includes(fault.field));
  return (
    <details
      className="jp-gpupool-Form-more"
      open={open || wrong}
      onToggle={event => setOpen(event.currentTarget.open)}
    >
      <summary>{props.label}</summary>
      {props.children}
    </details>
  );
}

/** What is asked for: whole GPUs, a share or an instance. */
export function Kinds(props: IFieldProps & { mig: boolean }): JSX.Element {
  const { draft, set, trans } = props;
  const kinds: [IDraft['kind'], string][] = [
    ['whole', trans.__('Whole GPUs')],
    ['share', trans.__('Share of one')]
  ];
  if (props.mig) {
    kinds.push(['mig', trans.__('MIG instance')]);
  }
  return (
    <fieldset className="jp-gpupool-Kinds">
      <legend>{trans.__('What')}</legend>
      {kinds.map(([kind, words]) => (
        <label key={kind} className={draft.kind === kind ? 'jp-mod-chosen' : ''}>
          <input
            type="radio"
            name="jp-gpupool-kind"
            checked={draft.kind === kind}
            onChange={() => set({ kind, gpus: '1' })}
          />
          {words}
        </label>
      ))}
    </fieldset>
  );
}
