// Package mcp is the room for `agentenv mcp`, an MCP server on stdio. Nothing
// serves yet.
//
// What will have to hold: stdout carries JSON-RPC and nothing else; the end of
// stdin ends the server and its work; an error is marked as one and says what
// to do.
package mcp
