// Lets the forms of a page ask Python (worker.js): form[data-ask] names the question, its fields are the arguments.
// A form asks at each change and keeps its fields in the address. One with a text asks at its button: a program to run,
// for which Python starts then, or an exercise, which is kept in the browser.
const SECONDS = 20;
const status = document.getElementById("status");
const forms = [...document.querySelectorAll("form[data-ask]")];
const fieldsOf = (form) => Object.fromEntries(new FormData(form));
const keptOf = (exercise) => JSON.parse(localStorage.getItem(`exercise ${exercise}`) ?? "{}");
const keep = (exercise, text, right) => localStorage.setItem(`exercise ${exercise}`, JSON.stringify({ text, right }));
const waiting = new Map();
let worker, started, count = 0;

function start() {
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => {
      if (data.ready) resolve();
      else if (data.failed) reject(data.failed);
      else waiting.get(data.id)?.(JSON.parse(data.answer));
    };
    worker.onerror = (event) => reject(event.message);
  });
}

// The answer of Python, or that it did not come in time: then Python starts anew.
function ask(name, fields) {
  const id = count++;
  return new Promise((resolve) => {
    const late = setTimeout(() => {
      worker.terminate();
      started = start();
      resolve({ text: `not yet: it did not end within ${SECONDS} s. Is there a loop that has no end?` });
    }, SECONDS * 1000);
    waiting.set(id, (answer) => { clearTimeout(late); resolve(answer); });
    worker.postMessage({ id, name, fields });
  }).finally(() => waiting.delete(id));
}

async function show(form) {
  const number = (form.asked = (form.asked ?? 0) + 1), fields = fieldsOf(form);
  started ??= start();
  if (form.dataset.ask === "run") form.querySelector("output").textContent = "Python is starting ...";
  await started;
  if (form.asked !== number) return; // it has been changed since
  const { text, picture, right } = await ask(form.dataset.ask, fields);
  if (form.asked !== number) return;
  const output = form.querySelector("output");
  output.innerHTML = picture ?? ""; // SVG of the library's own, whose texts are escaped
  if (text) output.prepend(Object.assign(document.createElement("pre"), { textContent: text }));
  if (right) keep(fields.exercise, fields.text, right);
}

// The address has the fields of one form: #check?call=einsum&line=...
function read() {
  const [name, fields] = location.hash.slice(1).split("?");
  const form = forms.find((form) => form.dataset.ask === name && fields !== undefined);
  if (!form) return;
  for (const [field, value] of new URLSearchParams(fields)) if (form.elements[field]) form.elements[field].value = value;
  form.scrollIntoView();
}

function write(form) {
  history.replaceState(null, "", `#${form.dataset.ask}?${new URLSearchParams(fieldsOf(form))}`);
}

for (const form of forms) {
  const exercise = form.elements.exercise?.value;
  form.addEventListener("submit", (event) => { event.preventDefault(); show(form); });
  if (exercise) {
    const kept = keptOf(exercise);
    if (kept.text) form.elements.text.value = kept.text;
    if (kept.right) form.querySelector("output").textContent = "You have solved this one.";
    form.addEventListener("input", () => {
      keep(exercise, form.elements.text.value, keptOf(exercise).right);
    });
    form.addEventListener("reset", () => localStorage.removeItem(`exercise ${exercise}`));
  } else if (!form.elements.text) {
    form.addEventListener("input", () => {
      write(form);
      clearTimeout(form.soon);
      form.soon = setTimeout(() => show(form), 150);
    });
  }
}

for (const mark of document.querySelectorAll("[data-solved]")) {
  if (keptOf(mark.dataset.solved).right) mark.textContent = " ✓ solved";
}

if (status) {
  read();
  addEventListener("hashchange", () => { read(); forms.filter((form) => !form.elements.text).forEach(show); });
  started = start();
  started.then(
    () => {
      status.textContent = status.dataset.ready;
      for (const form of forms) {
        form.querySelector("button[type=submit]").disabled = false;
        if (!form.elements.text) show(form);
      }
    },
    (error) => { status.textContent = `Python did not start: ${error}`; },
  );
}
