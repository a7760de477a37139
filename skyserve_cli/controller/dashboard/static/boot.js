// Loads the page. A script of it whose response was lost would leave the page blank without a word, so the page is loaded again.

const AGAIN_MS = 2000;

function say(text) {
  const link = document.getElementById("link");
  link.textContent = text;
  link.className = "bad";
}

import("/app.js").catch((error) => {
  if (error instanceof SyntaxError) {
    say("this browser cannot run the page; use a newer one");
    return;
  }
  say("the controller does not respond; trying again");
  setTimeout(() => location.reload(), AGAIN_MS);
});
