// Starts Python in the browser, gives it the project's wheel, and lets the page's forms ask play.py.
const here = new URL(".", import.meta.url);
const status = document.getElementById("status");
const forms = document.querySelectorAll("form[data-ask]");

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

function ask(answer, form) {
  const given = Object.fromEntries(new FormData(form));
  form.querySelector("output").textContent = answer(form.dataset.ask, JSON.stringify(given));
}

start().then(
  (answer) => {
    status.textContent = "Ready: change a field, and press Enter.";
    for (const form of forms) {
      form.addEventListener("submit", (event) => { event.preventDefault(); ask(answer, form); });
      form.querySelector("button").disabled = false;
      ask(answer, form);
    }
  },
  (error) => { status.textContent = `Python did not start: ${error}`; },
);
