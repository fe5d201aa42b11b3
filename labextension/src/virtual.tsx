/**
 * A long list of which only what can be seen is in the page.
 */

import React from 'react';

/** A row: how high it is in pixels, and how it is drawn. */
export interface IRow {
  key: string;
  height: number;
  draw: () => JSX.Element;
}

/** So many pixels above and below what can be seen are drawn too. */
const MARGIN = 200;

/** Draw the rows that are in view. */
export class Rows extends React.Component<{ rows: IRow[]; onWidth: (width: number) => void }, IState> {
  override state: IState = { top: 0, height: 600 };

  override componentDidMount(): void {
    const node = this._node.current;
    if (node && typeof ResizeObserver !== 'undefined') {
      this._observer = new ResizeObserver(() => this._measure());
      this._observer.observe(node);
    }
    this._measure();
  }

  override componentWillUnmount(): void {
    this._observer?.disconnect();
  }

  override render(): JSX.Element {
    const { top, height } = this.state;
    const shown: JSX.Element[] = [];
    let at = 0;
    for (const row of this.props.rows) {
      if (at + row.height > top - MARGIN && at < top + height + MARGIN) {
        shown.push(
          <div key={row.key} className="jp-gpupool-Rows-row" style={{ top: at, height: row.height }}>
            {row.draw()}
          </div>
        );
      }
      at += row.height;
    }
    return (
      <div className="jp-gpupool-Rows" ref={this._node} onScroll={this._onScroll} tabIndex={-1}>
        <div className="jp-gpupool-Rows-inner" style={{ height: at }}>
          {shown}
        </div>
      </div>
    );
  }

  /** Scroll so that a row can be seen. */
  reveal(key: string): void {
    const node = this._node.current;
    let at = 0;
    for (const row of this.props.rows) {
      if (row.key === key) {
        break;
      }
      at += row.height;
    }
    const height = this.props.rows.find(row => row.key === key)?.height ?? 0;
    if (node && at < node.scrollTop) {
      node.scrollTop = at;
    } else if (node && at + height > node.scrollTop + node.clientHeight) {
      node.scrollTop = at + height - node.clientHeight;
    }
  }

  private _onScroll = (event: React.UIEvent<HTMLDivElement>): void => {
    this.setState({ top: event.currentTarget.scrollTop });
  };

  private _measure(): void {
    const node = this._node.current;
    if (node && node.clientHeight) {
      this.setState({ height: node.clientHeight });
      this.props.onWidth(node.clientWidth);
    }
  }

  private _node = React.createRef<HTMLDivElement>();
  private _observer: ResizeObserver | undefined;
}

interface IState {
  top: number;
  height: number;
}
