"""The Responses examples of Lilac's documentation, verbatim, with the clients that they share."""

PYTHON_CLIENT = """
from openai import OpenAI

client = OpenAI(
    base_url="https://api.getlilac.com/v1",
    api_key="your-lilac-api-key",
)
"""

PYTHON_BASIC = """
response = client.responses.create(
    model="moonshotai/kimi-k2.6",
    input="Explain GPU inference in two sentences.",
)

print(response.output_text)
"""

PYTHON_STRUCTURED = """
response = client.responses.create(
    model="moonshotai/kimi-k2.6",
    input="Give me a color with its name and hex code.",
    text={
        "format": {
            "type": "json_schema",
            "name": "color",
            "schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "hex": {"type": "string"}
                },
                "required": ["name", "hex"]
            }
        }
    },
)

print(response.output_text)
# {"name": "Teal", "hex": "#008080"}
"""

PYTHON_TOOLS = """
response = client.responses.create(
    model="moonshotai/kimi-k2.6",
    input="What's the weather in NYC?",
    tools=[
        {
            "type": "function",
            "name": "get_weather",
            "description": "Get current weather for a location",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {"type": "string"}
                },
                "required": ["location"]
            }
        }
    ],
)

for item in response.output:
    if item.type == "function_call":
        print(f"{item.name}({item.arguments})")
        # get_weather({"location": "NYC"})
"""

PYTHON_INSTRUCTIONS = """
response = client.responses.create(
    model="moonshotai/kimi-k2.6",
    input="Give me a color",
    instructions="Always respond in JSON with 'name' and 'hex' fields.",
    max_output_tokens=50,
)
"""

NODE_CLIENT = """
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: "https://api.getlilac.com/v1",
  apiKey: "your-lilac-api-key",
});
"""

NODE_BASIC = """
const response = await client.responses.create({
  model: "moonshotai/kimi-k2.6",
  input: "Explain GPU inference in two sentences.",
});

console.log(response.output_text);
"""

NODE_STRUCTURED = """
const response = await client.responses.create({
  model: "moonshotai/kimi-k2.6",
  input: "Give me a color with its name and hex code.",
  text: {
    format: {
      type: "json_schema",
      name: "color",
      schema: {
        type: "object",
        properties: {
          name: { type: "string" },
          hex: { type: "string" },
        },
        required: ["name", "hex"],
      },
    },
  },
});

console.log(response.output_text);
"""

NODE_TOOLS = """
const response = await client.responses.create({
  model: "moonshotai/kimi-k2.6",
  input: "What's the weather in NYC?",
  tools: [
    {
      type: "function",
      name: "get_weather",
      description: "Get current weather for a location",
      parameters: {
        type: "object",
        properties: {
          location: { type: "string" },
        },
        required: ["location"],
      },
    },
  ],
});

for (const item of response.output) {
  if (item.type === "function_call") {
    console.log(`${item.name}(${item.arguments})`);
  }
}
"""

CURL_BASIC = """
curl https://api.getlilac.com/v1/responses \\
  -H "Authorization: Bearer your-lilac-api-key" \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "moonshotai/kimi-k2.6",
    "input": "Explain GPU inference in two sentences."
  }'
"""

CURL_STRUCTURED = """
curl https://api.getlilac.com/v1/responses \\
  -H "Authorization: Bearer your-lilac-api-key" \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "moonshotai/kimi-k2.6",
    "input": "Give me a color with its name and hex code.",
    "text": {
      "format": {
        "type": "json_schema",
        "name": "color",
        "schema": {
          "type": "object",
          "properties": {
            "name": {"type": "string"},
            "hex": {"type": "string"}
          },
          "required": ["name", "hex"]
        }
      }
    }
  }'
"""

CURL_TOOLS = """
curl https://api.getlilac.com/v1/responses \\
  -H "Authorization: Bearer your-lilac-api-key" \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "moonshotai/kimi-k2.6",
    "input": "What is the weather in NYC?",
    "tools": [
      {
        "type": "function",
        "name": "get_weather",
        "description": "Get current weather for a location",
        "parameters": {
          "type": "object",
          "properties": {
            "location": {"type": "string"}
          },
          "required": ["location"]
        }
      }
    ]
  }'
"""

CURL_INSTRUCTIONS = """
curl https://api.getlilac.com/v1/responses \\
  -H "Authorization: Bearer your-lilac-api-key" \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "moonshotai/kimi-k2.6",
    "input": "Give me a color",
    "instructions": "Always respond in JSON with name and hex fields.",
    "max_output_tokens": 50
  }'
"""
