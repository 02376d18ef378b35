"""The client of MCP servers that requests name: which hosts it may reach, its HTTP transport and its connections.

`client` is what the rest of the server uses. `transport` and `connection` need the extra `mcp` and are imported when
the first request with an MCP server arrives.
"""
