"""Tools of the type `mcp` with a `server_url`: the server lists and calls the tools of an MCP server itself.

`tools` reads the field, `input` the items, `builders` writes the items of `items`. `rounds` executes calls between the
generations of a response.
"""
