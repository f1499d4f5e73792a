// Package daemon is the room for the server behind `agentenv daemon` and the
// socket of `agentenv supervise`: a newline-delimited JSON protocol, and HTTP.
// Nothing serves yet.
//
// What will have to hold: the socket is 0600 from birth and checks who calls;
// every request gets one reply or error; a client that goes away takes its
// work with it; HTTP always wants a token.
package daemon
