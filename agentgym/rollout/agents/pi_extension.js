// Gives Pi, which has no MCP client, the environment's tools: a call of one is a call over MCP.
import { readFileSync } from "node:fs";

const url = process.env.AGENTGYM_MCP_URL;
const headers = {
  Authorization: `Bearer ${process.env.AGENTGYM_KEY}`,
  "Content-Type": "application/json",
  Accept: "application/json, text/event-stream",
};
let number = 0;

async function send(method, params, isRequest = true) {
  const message = { jsonrpc: "2.0", method, params, ...(isRequest && { id: ++number }) };
  const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(message) });
  const text = await response.text();
  if (!response.ok) throw new Error(`${method}: HTTP ${response.status}: ${text}`);
  const session = response.headers.get("mcp-session-id");
  if (session) headers["Mcp-Session-Id"] = session;
  if (!isRequest) return undefined;
  const isStream = (response.headers.get("content-type") ?? "").startsWith("text/event-stream");
  const lines = isStream ? [...text.matchAll(/^data: ?(.*)$/gm)].map((match) => match[1]) : [text];
  const answer = lines.filter(Boolean).map((line) => JSON.parse(line)).find((each) => each.id === message.id);
  if (!answer || answer.error) throw new Error(answer?.error?.message ?? `${method}: no answer`);
  return answer.result;
}

export default async function (pi) {
  const clientInfo = { name: "pi", version: "1" };
  const { protocolVersion } = await send("initialize", { protocolVersion: "2025-06-18", capabilities: {}, clientInfo });
  headers["MCP-Protocol-Version"] = protocolVersion;
  await send("notifications/initialized", {}, false);
  for (const tool of JSON.parse(readFileSync(`${process.env.HOME}/tools.json`, "utf8"))) {
    const { name, description, parameters } = tool.function;
    pi.registerTool({
      name,
      label: name,
      description: description ?? name,
      parameters,
      async execute(_id, args) {
        const result = await send("tools/call", { name, arguments: args });
        const content = result.content.filter((part) => part.type === "text");
        if (result.isError) throw new Error(content.map((part) => part.text).join("\n"));
        return { content, details: {} };
      },
    });
  }
}
