// Python of the pages, in a thread of its own: Pyodide with the project's wheel, which answers by play.py.
const here = new URL(".", import.meta.url);

async function start() {
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", here));
  const [python, wheel, program] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", here).href }),
    fetch(new URL("pyodide/scaling.whl", here)).then((file) => file.arrayBuffer()),
    fetch(new URL("play.py", here)).then((file) => file.text()),
  ]);
  python.unpackArchive(wheel, "wheel");
  const names = python.globals.get("dict")();
  python.runPython(program, { globals: names });
  return names.get("answer");
}

const ready = start();
ready.then(() => postMessage({ ready: true }), (error) => postMessage({ failed: String(error) }));
onmessage = async ({ data }) => {
  const answer = await ready;
  postMessage({ id: data.id, answer: answer(data.name, JSON.stringify(data.fields)) });
};
