module.exports = {
  rootDir: '..',
  roots: ['<rootDir>/check'],
  testEnvironment: 'jsdom',
  testRegex: 'check/.*\\.spec\\.tsx?$',
  moduleFileExtensions: ['ts', 'tsx', 'js', 'json'],
  moduleNameMapper: { '\\.(svg|css)$': '<rootDir>/check/empty.js' },
  transform: {
    '\\.(ts|tsx|js|mjs)$': [
      require.resolve('@swc/jest'),
      {
        jsc: {
          parser: { syntax: 'typescript', tsx: true, decorators: true },
          target: 'es2022',
          transform: { react: { runtime: 'classic' } }
        },
        module: { type: 'commonjs' }
      }
    ]
  },
  // JupyterLab's packages are ES modules.
  transformIgnorePatterns: [
    '/node_modules/(?!(@jupyter|@jupyterlab|@lumino|@microsoft|lib0|yjs|y-protocols|exenv-es6|@rjsf|vscode-.*|nanoid|uuid|marked|lodash-es)/)'
  ],
  setupFiles: ['<rootDir>/check/setup.js']
};
