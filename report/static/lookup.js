// The lookup's choices: rows that do not fit are hidden. Without script the table is whole.
const choice = document.getElementById("lookup-choice");
const rows = [...document.querySelectorAll("#lookup-rows tbody tr")];
const selects = [...choice.querySelectorAll("select")];

function show() {
  const fits = (row) =>
    selects.every(({ value, dataset }) =>
      !value || row.dataset[dataset.column].split(" ").includes(value));
  for (const row of rows) row.hidden = !fits(row);
  const shown = rows.filter((row) => !row.hidden).length;
  document.getElementById("lookup-count").textContent = `${shown} of ${rows.length} lines`;
}

choice.hidden = false;
choice.addEventListener("change", show);
show();
