// Fills the choice of versions from versions.json, which lies beside the folder of this version.
const root = new URL(document.documentElement.dataset.content_root, location.href);

async function offerVersions() {
  const choice = document.querySelector(".versions select");
  const here = root.pathname.split("/").at(-2);
  const answer = await fetch(new URL("../versions.json", root));
  const names = answer.ok ? await answer.json() : [];
  if (!names.includes(here)) return;
  choice.replaceChildren(...names.map((name) => new Option(name, name, false, name === here)));
  choice.addEventListener("change", async () => {
    const other = new URL(`../${choice.value}/`, root);
    const page = new URL(location.href.slice(root.href.length), other);
    const found = await fetch(page, { method: "HEAD" });
    location.href = found.ok ? page : other; // a version may lack the page
  });
}

document.addEventListener("DOMContentLoaded", () => offerVersions().catch(() => {})); // a file
