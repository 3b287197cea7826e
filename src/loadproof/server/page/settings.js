// The knobs: a form whose filled-in fields become parameters of a request.

const form = document.getElementById("knobs");

/** Parameters of the request that the form says; empty fields are left to the model. */
export function parameters() {
  const chosen = {};
  for (const { name, value } of form.querySelectorAll("input")) if (value !== "") chosen[name] = Number(value);
  const stops = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stops.length) chosen.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
  return chosen;
}

/** The system message as the beginning of a conversation; none where it is empty. */
export function opening() {
  const content = form.elements.system.value;
  return content.trim() === "" ? [] : [{ role: "system", content }];
}

/** Whether all fields hold what they may; shows the first that doesn't. */
export function valid() {
  if (form.checkValidity()) return true;
  document.getElementById("settings").open = true;
  return form.reportValidity();
}
