// What a browser has and jsdom lacks.
const { TextDecoder, TextEncoder } = require('util');

Object.assign(global, { TextDecoder, TextEncoder });
global.DragEvent = class DragEvent {};
global.ResizeObserver = class ResizeObserver {
  observe() {}
  disconnect() {}
};
global.fetch = global.fetch || (() => Promise.reject(new Error('no network here')));
global.Request = global.Request || class Request {};
global.Response = global.Response || class Response {};
global.Headers = global.Headers || class Headers {};
global.matchMedia =
  global.matchMedia || (() => ({ matches: false, addListener() {}, addEventListener() {} }));
global.CSSStyleSheet.prototype.replaceSync = global.CSSStyleSheet.prototype.replaceSync || function () {};
