// The page: on narrow screens the panels begin folded, so that the chat comes first.

import "./chat.js";
import { watch } from "./engine.js";

if (matchMedia("(max-width: 60rem)").matches) {
  for (const panel of document.querySelectorAll("details.panel")) panel.open = false;
} else {
  document.getElementById("message").focus(); // where that brings up no keyboard over the page
}
watch();
