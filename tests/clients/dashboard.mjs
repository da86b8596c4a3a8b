// The live page in Chromium: while answers are generated, in both colour schemes, narrow, with names that are markup.
// Prints one JSON object. Screenshots go to the folder that is named.
import { chromium } from "playwright-core";

const [url, folder, executablePath] = process.argv.slice(2);
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath, args: [...quiet, "--disable-component-update", "--disable-sync"] });
const problems = [];
const elsewhere = [];

async function open(name, { width = 1280, colorScheme = "light", rewrite } = {}) {
  const page = await browser.newPage({ viewport: { width, height: 900 }, colorScheme });
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && problems.push(name + ": " + message.text()));
  page.on("pageerror", (error) => problems.push(name + ": " + error.message));
  page.on("request", (request) => request.url().startsWith(url) || elsewhere.push(request.url()));
  if (rewrite) {
    await page.route("**/v1/alignedserve/live", async (route) => {
      const response = await route.fetch();
      await route.fulfill({ response, json: rewrite(await response.json()) });
    });
  }
  await page.goto(url + "/dashboard");
  await page.locator("#workers tbody tr").first().waitFor();
  return page;
}

const light = await open("light");
await light.locator(".tile .big", { hasText: /^[1-9][\d,]*tokens\/s$/ }).first().waitFor({ timeout: 60000 });
const told = await light.evaluate(() => ({
  state: document.getElementById("state").textContent,
  tiles: document.querySelectorAll(".tile").length,
  sections: [...document.querySelectorAll("section:not([hidden]) > .head h2")].map((one) => one.textContent),
  workers: [...document.querySelectorAll("#workers tbody tr td:first-child")].map((one) => one.textContent),
  nodes: document.querySelectorAll("#tree .node").length,
  background: getComputedStyle(document.body).backgroundColor,
  percents: [1, 0.9996, 0.5, 0.0002, 0].map(percent),
}));
await light.screenshot({ path: folder + "/light.png", fullPage: true });

const dark = await open("dark", { colorScheme: "dark" });
const darkBackground = await dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
await dark.screenshot({ path: folder + "/dark.png", fullPage: true });

const narrow = await open("narrow", { width: 390 });
const overflow = await narrow.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
await narrow.screenshot({ path: folder + "/narrow.png", fullPage: true });

const markup = "<img src=x onerror=document.title='taken'><b>w</b>";
const hostile = await open("hostile", {
  rewrite: (found) => {
    found.models[0].load.workers[0].worker = markup;
    found.models[0].load.trees[0].place = markup;
    return found;
  },
});
const shown = await hostile.evaluate(() => ({
  title: document.title,
  first: document.querySelector("#workers tbody td").textContent,
  elements: document.querySelectorAll("main img, main b:not(.legend b)").length,
}));

let isDown = false;
const lost = await open("lost", { rewrite: (found) => found });
await lost.unroute("**/v1/alignedserve/live");
await lost.route("**/v1/alignedserve/live", (route) => (isDown ? route.abort() : route.fallback()));
isDown = true;
await lost.locator("#state.bad").waitFor();
const afterLoss = await lost.locator("#state").textContent();
isDown = false;
await lost.locator("#state:not(.bad)").waitFor();

await browser.close();
const ours = problems.filter((one) => !one.startsWith("lost: Failed to load resource"));
console.log(JSON.stringify({ told, darkBackground, overflow, markup, shown, afterLoss, problems: ours, elsewhere }));
